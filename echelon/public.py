"""The public names: what ``echelon.X`` and ``from echelon import X`` give, when the first of them is asked for."""

from echelon.annotation import annotate, pipeline, replicate, set_default, split, stage
from echelon.distribution import distribute
from echelon.elastic import Elastic
from echelon.engine import Engine
from echelon.errors import EchelonError
from echelon.keep import Checkpoint
from echelon.notebook import launch
from echelon.plan import Plan
from echelon.slices import Slices, cluster
from echelon.strategy import (
    AdaptiveLocalSgd,
    Amp,
    Auto,
    Dgc,
    Fast,
    Lamb,
    Lars,
    Lean,
    LocalSgd,
    LrScaling,
    Outer,
    ParameterServer,
    Recompute,
    Reduction,
    Shard,
    Strategy,
)
from echelon.watch import Log
from echelon.world import (
    barrier,
    device,
    init,
    is_first_worker,
    is_server,
    is_worker,
    local_rank,
    node_rank,
    rank,
    server_endpoints,
    server_num,
    shutdown,
    worker_endpoints,
    worker_index,
    worker_num,
    world_size,
)

__all__ = [
    "AdaptiveLocalSgd",
    "Amp",
    "Auto",
    "Checkpoint",
    "Dgc",
    "EchelonError",
    "Elastic",
    "Engine",
    "Fast",
    "Lamb",
    "Lars",
    "Lean",
    "LocalSgd",
    "Log",
    "LrScaling",
    "Outer",
    "ParameterServer",
    "Plan",
    "Recompute",
    "Reduction",
    "Shard",
    "Slices",
    "Strategy",
    "annotate",
    "barrier",
    "cluster",
    "device",
    "distribute",
    "init",
    "is_first_worker",
    "is_server",
    "is_worker",
    "launch",
    "local_rank",
    "node_rank",
    "pipeline",
    "rank",
    "replicate",
    "server_endpoints",
    "server_num",
    "set_default",
    "shutdown",
    "split",
    "stage",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]
