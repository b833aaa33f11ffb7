"""Norms of whole parameters for layerwise optimizers (LARS, LAMB) that hold only parts of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.collectives import start_small_sum
from echelon.distributed.local_state import LocalState
from echelon.distributed.mesh_groups import MeshGroups
from echelon.optim.layerwise import LayerwiseOptimizer


def add_up_norms(
    optimizers: Mapping[str, torch.optim.Optimizer],
    local_state: LocalState,
    cut: Collection[str],
    sharded: Collection[str],
    grid: MeshGroups,
    sharing: dist.ProcessGroup | None,
) -> None:
    """Make LARS and LAMB, which need the norms of whole parameters, sum the squares of the parts over ranks.

    sharing: ranks that share the shards of a parameter
    """
    names = local_state.names
    # A parameter that cannot be cut is whole on all ranks.
    shared_out = {name for name in sharded if not local_state.layouts[name].is_whole}
    axes = [(cut, grid.group("split")) if cut else None, (shared_out, sharing) if sharded else None]
    groups = [(parts, group) for parts, group in filter(None, axes) if group is not None]

    def add_up(parameters: list[Tensor], squares: Tensor) -> Tensor:
        for parts, group in groups:
            parted = torch.tensor([names[id(p)] in parts for p in parameters], device=squares.device)
            total = start_small_sum(torch.where(parted, squares, torch.zeros_like(squares)), group)()
            squares = torch.where(parted, total, squares)
        return squares

    for optimizer in optimizers.values():
        if isinstance(optimizer, LayerwiseOptimizer) and groups:
            optimizer.sum_squares = add_up
