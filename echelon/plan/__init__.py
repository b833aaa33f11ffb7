"""The seam: everything that decides writes a Plan, everything that runs reads one. And the planner's public names."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.plan.build import make_plan
    from echelon.plan.plan import Bucket, Parameter, Plan
    from echelon.planner.cluster.cluster import Cluster
    from echelon.planner.cost.predict import predict
    from echelon.planner.draft import Draft
    from echelon.planner.prediction import Prediction
    from echelon.planner.profile.builders import bert, gpt, llama
    from echelon.planner.profile.profile import Profile, profile
    from echelon.planner.search.search import search

#: Where each name is kept. Imported when asked for: the planner builds on this package, and commands that only draw a
#: schedule need no torch.
_HOMES = {
    "Bucket": "plan.plan",
    "Cluster": "planner.cluster.cluster",
    "Draft": "planner.draft",
    "Parameter": "plan.plan",
    "Plan": "plan.plan",
    "Prediction": "planner.prediction",
    "Profile": "planner.profile.profile",
    "bert": "planner.profile.builders",
    "gpt": "planner.profile.builders",
    "llama": "planner.profile.builders",
    "make_plan": "plan.build",
    "predict": "planner.cost.predict",
    "profile": "planner.profile.profile",
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
