"""The HTML page of a run: ``echelon report`` writes the page, ``echelon watch`` serves it during the run."""
