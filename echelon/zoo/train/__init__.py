"""The implementation of ``echelon train``, from parameters to a training run."""
