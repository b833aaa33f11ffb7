"""A run as a page: ``echelon report`` writes it, ``echelon watch`` serves it while the run goes on."""
