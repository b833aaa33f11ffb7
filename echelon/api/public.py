"""The public names ``echelon.X``, imported when the first of them is used."""

import warnings
from typing import Any

from echelon.api.distribute import distribute
from echelon.api.launch import LaunchError, launch
from echelon.base.errors import EchelonError
from echelon.base.user_traceback import install_hook
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.construction.deferred import deferred
from echelon.data.schedule_length import steps
from echelon.distributed.main_process import is_main_process, main_process_first
from echelon.distributed.world import (
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
from echelon.engine.elastic import Elastic
from echelon.engine.engine import Engine
from echelon.engine.lr_schedules import per_epoch
from echelon.engine.on_nonfinite import OnNonfinite
from echelon.observability.metrics import Log
from echelon.parameter_server.servable.export_servable import export_servable
from echelon.parameter_server.servable.servable import load_servable
from echelon.parameter_server.servable.servable_writer import ServableWriter
from echelon.plan import Plan
from echelon.strategy import (
    AdaptiveLocalSgd,
    Amp,
    Auto,
    Dgc,
    Fast,
    Lamb,
    Lars,
    LocalSgd,
    Lora,
    LowMemory,
    LrScaling,
    Outer,
    ParameterServer,
    Recompute,
    Reduction,
    Shard,
    Strategy,
)
from echelon.strategy.annotations.annotate import annotate, pipeline, replicate, set_default, split, stage
from echelon.strategy.annotations.slices import Slices, cluster

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
    "LaunchError",
    "LocalSgd",
    "Log",
    "Lora",
    "LowMemory",
    "LrScaling",
    "OnNonfinite",
    "Outer",
    "ParameterServer",
    "Plan",
    "Recompute",
    "Reduction",
    "ServableWriter",
    "Shard",
    "Slices",
    "Strategy",
    "annotate",
    "barrier",
    "cluster",
    "deferred",
    "device",
    "distribute",
    "export_servable",
    "init",
    "is_first_worker",
    "is_main_process",
    "is_server",
    "is_worker",
    "launch",
    "load_servable",
    "local_rank",
    "main_process_first",
    "node_rank",
    "per_epoch",
    "pipeline",
    "rank",
    "replicate",
    "server_endpoints",
    "server_num",
    "set_default",
    "shutdown",
    "split",
    "stage",
    "steps",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Return a public name by the name it had before, with a warning."""
    if name != "Lean":
        raise AttributeError(f"module 'echelon.api.public' has no attribute '{name}'")
    warnings.warn("echelon.Lean is now echelon.LowMemory", FutureWarning, stacklevel=3)
    return LowMemory


install_hook()  # errors before init() are one line, too
