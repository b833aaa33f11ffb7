"""The seam: everything that decides writes a Plan, everything that runs reads one. And the planner's public names."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.plan.make import make_plan
    from echelon.plan.plan import Bucket, Parameter, Plan
    from echelon.planner.cost.predict import predict
    from echelon.planner.draft import Draft
    from echelon.planner.machines.cluster import Cluster
    from echelon.planner.model.builders import bert, gpt, llama
    from echelon.planner.model.profile import Profile, profile
    from echelon.planner.prediction import Prediction
    from echelon.planner.search.search import search

#: Where each name is kept. Imported when asked for: the planner builds on this package, and commands that only draw a
#: schedule need no torch.
_HOMES = {
    "Bucket": "plan.plan",
    "Cluster": "planner.machines.cluster",
    "Draft": "planner.draft",
    "Parameter": "plan.plan",
    "Plan": "plan.plan",
    "Prediction": "planner.prediction",
    "Profile": "planner.model.profile",
    "bert": "planner.model.builders",
    "gpt": "planner.model.builders",
    "llama": "planner.model.builders",
    "make_plan": "plan.make",
    "predict": "planner.cost.predict",
    "profile": "planner.model.profile",
    "search": "planner.search.search",
}

__all__ = [
    "Bucket",
    "Cluster",
    "Draft",
    "Parameter",
    "Plan",
    "Prediction",
    "Profile",
    "bert",
    "gpt",
    "llama",
    "make_plan",
    "predict",
    "profile",
    "search",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'echelon.plan' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"echelon.{_HOMES[name]}"), name)
