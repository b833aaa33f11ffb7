"""``echelon memory``: what a training step holds, module by module and kind by kind, without running it."""

from echelon.footprint.footprint import find_footprint
from echelon.footprint.job import Job
from echelon.record.facts import Footprint

__all__ = ["Footprint", "Job", "find_footprint"]
