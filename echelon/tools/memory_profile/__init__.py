"""``echelon memory``: what a training step holds, module by module and kind by kind, without running it."""

from echelon.observability.runlog.run_metadata import Footprint
from echelon.tools.memory_profile.footprint import find_footprint
from echelon.tools.memory_profile.training_job import TrainingJob

__all__ = ["Footprint", "TrainingJob", "find_footprint"]
