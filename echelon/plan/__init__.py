"""The seam: everything that decides writes a Plan, everything that runs reads one. And the planner's public names."""

from typing import TYPE_CHECKING, Any

from echelon.plan.make import make_plan
from echelon.plan.plan import Bucket, Parameter, Plan

if TYPE_CHECKING:
    from echelon.planner.cost.predict import predict
    from echelon.planner.draft import Draft
    from echelon.planner.machines.cluster import Cluster
    from echelon.planner.model.builders import bert, gpt, llama
    from echelon.planner.model.profile import Profile, profile
    from echelon.planner.prediction import Prediction
    from echelon.planner.search.search import search

#: Where the planner keeps what it offers. It builds on this package, so that it is imported when it is asked for.
_PLANNER = {
    "Cluster": "machines.cluster",
    "Draft": "draft",
    "Prediction": "prediction",
    "Profile": "model.profile",
    "bert": "model.builders",
    "gpt": "model.builders",
    "llama": "model.builders",
    "predict": "cost.predict",
    "profile": "model.profile",
    "search": "search.search",
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
    if name not in _PLANNER:
        raise AttributeError(f"module 'echelon.plan' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"echelon.planner.{_PLANNER[name]}"), name)
