"""``echelon explain``: what a strategy does, in which order, and what it sends."""
