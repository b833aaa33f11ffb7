"""The ``Plan`` of a job: strategy and planner create it, and the engine executes it."""

from typing import TYPE_CHECKING, Any

from echelon.base.late_import import late_import

if TYPE_CHECKING:
    from echelon.plan.build import make_plan
    from echelon.plan.plan import Bucket, Parameter, Plan

#: The module of each name, imported on first access, because commands that only draw a schedule need no torch.
_MODULES = {
    "Bucket": "echelon.plan.plan",
    "Parameter": "echelon.plan.plan",
    "Plan": "echelon.plan.plan",
    "make_plan": "echelon.plan.build",
}
#: Planner names that this package had before ``echelon.planner`` was public; they are deprecated.
_OF_PLANNER = ("Cluster", "Draft", "Prediction", "Profile", "bert", "gpt", "llama", "predict", "profile", "search")

_late = late_import(__name__, _MODULES | dict.fromkeys(_OF_PLANNER, "echelon.planner"))

__all__ = ["Bucket", "Parameter", "Plan", "make_plan"]


def __getattr__(name: str) -> Any:
    if name in _OF_PLANNER:
        import warnings

        old, new = f"echelon.plan.{name}", f"echelon.planner.{name}"
        warnings.warn(f"{old} is now {new}; the next version removes the old name", FutureWarning, stacklevel=2)
    return _late(name)
