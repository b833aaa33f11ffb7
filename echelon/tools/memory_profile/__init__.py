"""``echelon memory``: predict the memory of a training step, by module and kind, without running it."""

from typing import TYPE_CHECKING, Any

from echelon.base.late_import import late_import

if TYPE_CHECKING:
    from echelon.observability.runlog.run_metadata import Footprint
    from echelon.tools.memory_profile.footprint import find_footprint
    from echelon.tools.memory_profile.training_job import TrainingJob

__all__ = ["Footprint", "TrainingJob", "find_footprint"]

_late = late_import(
    __name__,
    {
        "Footprint": "echelon.observability.runlog.run_metadata",
        "TrainingJob": "echelon.tools.memory_profile.training_job",
        "find_footprint": "echelon.tools.memory_profile.footprint",
    },
)


def __getattr__(name: str) -> Any:
    if name != "Job":
        return _late(name)
    import warnings

    warnings.warn("Job is now TrainingJob; the next version removes the old name", FutureWarning, stacklevel=2)
    return _late("TrainingJob")
