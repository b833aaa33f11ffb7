"""``echelon memory``: predict the memory of a training step, by module and kind, without running it."""

from typing import Any

from echelon.observability.runlog.run_metadata import Footprint
from echelon.tools.memory_profile.footprint import find_footprint
from echelon.tools.memory_profile.training_job import TrainingJob

__all__ = ["Footprint", "TrainingJob", "find_footprint"]


def __getattr__(name: str) -> Any:
    if name != "Job":
        raise AttributeError(f"module 'echelon.tools.memory_profile' has no attribute '{name}'")
    import warnings

    warnings.warn("Job is now TrainingJob; the next version removes the old name", FutureWarning, stacklevel=2)
    return TrainingJob
