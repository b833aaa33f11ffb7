"""Seeing what happens: where the step's time goes, the console, and the metrics files."""

from echelon.watch.log import Log
from echelon.watch.watch import Watch

__all__ = ["Log", "Watch"]
