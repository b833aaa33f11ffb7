"""Echelon: train one PyTorch model on many devices, with the numbers one process gives."""

from echelon.errors import EchelonError
from echelon.world import (
    barrier,
    device,
    init,
    is_first_worker,
    local_rank,
    node_rank,
    rank,
    shutdown,
    worker_endpoints,
    worker_index,
    worker_num,
    world_size,
)

__version__ = "0.1.0"

__all__ = [
    "EchelonError",
    "barrier",
    "device",
    "init",
    "is_first_worker",
    "local_rank",
    "node_rank",
    "rank",
    "shutdown",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]
