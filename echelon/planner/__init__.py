"""The planner: profiles a model, describes a cluster, and searches for the fastest parallel plan."""

from typing import TYPE_CHECKING

from echelon.base.late_import import late_import

if TYPE_CHECKING:
    from echelon.plan.draft import Draft
    from echelon.plan.prediction import Prediction
    from echelon.planner.cluster.cluster import Cluster
    from echelon.planner.cost.predict import predict
    from echelon.planner.plan_search.search import search
    from echelon.planner.profiling.builders import bert, gpt, llama
    from echelon.planner.profiling.profile import Profile, profile

__getattr__ = late_import(
    __name__,
    {
        "Cluster": "echelon.planner.cluster.cluster",
        "Draft": "echelon.plan.draft",
        "Prediction": "echelon.plan.prediction",
        "Profile": "echelon.planner.profiling.profile",
        "bert": "echelon.planner.profiling.builders",
        "gpt": "echelon.planner.profiling.builders",
        "llama": "echelon.planner.profiling.builders",
        "profile": "echelon.planner.profiling.profile",
        "predict": "echelon.planner.cost.predict",
        "search": "echelon.planner.plan_search.search",
    },
)

__all__ = ["Cluster", "Draft", "Prediction", "Profile", "bert", "gpt", "llama", "predict", "profile", "search"]
