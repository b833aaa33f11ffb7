"""Gathers the rows of the global batch from all replicas, for losses that need all of them.

The backward of the gather sums gradients over replicas. Every replica's loss is weighted by its share of the batch,
and the shares add up to one: a loss that every replica computes on all rows has the gradients of one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from echelon.base.errors import UsageError
from echelon.distributed.mesh_groups import MeshGroups
from echelon.parallel.data import batch_norm
from echelon.plan import Plan


class BatchRows:
    """This rank's view of the replicas that share a batch.

    served: True if replicas are connected only through parameter servers; default False
    """

    current: BatchRows | None = None  #: the instance of the engine that runs, or of the one created last

    def __init__(self, plan: Plan, grid: MeshGroups, served: bool = False) -> None:
        self._plan, self._grid, self._served = plan, grid, served
        self._group = grid.group(*plan.data_axes)
        self.is_used = False  #: True if rows were gathered in this pass; in a user-written loop, since the last update
        BatchRows.current = self

    def begin(self) -> None:
        """Make this instance the current one, at the beginning of a pass of its engine."""
        BatchRows.current, self.is_used = self, False

    def restart(self) -> None:
        """Forget that rows were gathered, after the update of a user-written loop."""
        self.is_used = False

    def gather(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of all replicas for each tensor, in replica order, with gradients."""
        self._refuse()
        replicas = self._plan.replicas
        if replicas == 1:
            return list(features)
        if any(isinstance(each, FakeTensor) for each in features):  # another stage's, or a forward is being recorded
            return [torch.cat([each] * replicas) for each in features]
        assert self._group is not None
        self.is_used = True
        return [self._gathered(each, self._group) for each in features]

    def _gathered(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        from echelon.parallel.tensor.mappings import move_rows
        from echelon.parallel.tensor.split_axis import SplitAxis
        from echelon.parallel.tensor.split_collectives import gather_rows

        if batch_norm.is_stand_in_batch():  # this rank has no batch, so it contributes no rows
            rows = rows[:0]
        axis = SplitAxis(group, dist.get_rank(group), dist.get_world_size(group), batch_per_rank=True)
        sizes = gather_rows(rows, axis, "gather_batch(): replicas' rows are joined")
        return self._ordered(move_rows(rows, sizes, axis), sizes)

    def _ordered(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        """Order the blocks by replica: torch sorts the ranks of a group, but a plan may use another order."""
        ranks = self._grid.ranks(*self._plan.data_axes)
        if ranks == sorted(ranks):
            return whole
        blocks = dict(zip(sorted(ranks), torch.split(whole, list(sizes)), strict=True))
        return torch.cat([blocks[rank] for rank in ranks])

    def _refuse(self) -> None:
        if self._served or self._plan.local is not None:
            raise UsageError(
                "gather_batch(): replicas step alone here, each with weights of its own, so that there is no global "
                "batch; train without localsgd, and with parameter servers reduce the dense part among the workers: "
                "ParameterServer(dense='allreduce')"
            )
        if self._plan.reduce_op == "sum" and self._plan.replicas > 1:
            raise UsageError(
                "gather_batch(): every replica computes the loss of the whole batch, and Reduction(op='sum') would add "
                "it up once for each of them; use op='mean'"
            )
