"""``echelon train``: from parameters to a run."""
