"""Sums gradients of ZeRO shards over the split axis of the mesh."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from echelon.distributed.activity import waiting
from echelon.distributed.mesh_groups import MeshGroups
from echelon.parallel.zero import Shards
from echelon.plan import Plan


class SplitSums:
    """Sums over the split axis the gradients of shards of which each split rank has only a partial sum."""

    def __init__(self, plan: Plan, shards: Shards, grid: MeshGroups) -> None:
        self._group = grid.group("split")
        here = [b for b in plan.buckets if grid.coords["stage"] in b.stages and "split" in b.axes]
        self._shards = [(b.optimizer, shards.shards[name]) for b in here for name in b.parameters]

    @torch.no_grad()
    def add_up(self, optimizers: Collection[str]) -> None:
        for key, shard in self._shards:
            if key in optimizers and shard.grad is not None and shard.grad.numel():
                with waiting("sum of gradients over the split", "", self._group):
                    dist.all_reduce(shard.grad, group=self._group)
