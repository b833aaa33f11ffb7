"""The parts of the page, each from what a run has written down to what is said of it."""
