"""The two collectives of sharding: sums of which each rank gets its line, and lines of which every rank gets all.

On Gloo with CPU tensors both are messages between pairs of ranks, told apart by tags: their order does not matter,
and sums are made in the order of ranks. Everywhere else they are collectives, which all ranks must begin in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.activity import waiting
from echelon.distributed.collectives import PendingCollective, start_all_gather, start_all_to_all

# torch 2.13 renamed reduce_scatter_tensor and all_gather_into_tensor; 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Arrival = Callable[[], Tensor]  # call it to wait


class ShardCollectives:
    """Talks to the ranks that share the parameters out among them; ``group`` is ``None`` where there is only one.

    ``gathering`` are connections of their own for weights, so that they may overtake gradients.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, gathering: dist.ProcessGroup | None = None
    ) -> None:
        self._group, self._gathering = group, gathering or group
        self.ranks = dist.get_world_size(group) if group else 1
        self.me = dist.get_rank(group) if group else 0
        self._gloo = group is not None and dist.get_backend(group) == "gloo"
        self._pairs = self._gloo and device.type == "cpu"
        self.begun: Counter[str] = Counter()  #: how many sums and gathers there were

    def sum_lines(self, matrix: Tensor, tag: int, what: str = "") -> Arrival:
        """Begin to add up every rank's ``matrix``; what arrives is this rank's line of the sum, in fresh memory.

        ``matrix`` is given away.
        """
        self.begun["sum"] += 1
        if self._group is None:
            return lambda: matrix[0]
        wait = waiting("sum of gradients", what, self._group)
        if self._pairs:
            came = torch.empty_like(matrix)
            swap = start_all_to_all(came, matrix, self._group, tag)
            return lambda: _added(_after(swap, came, wait))
        if self._gloo:  # it has no reduce-scatter for tensors of a GPU
            work = dist.all_reduce(matrix, group=self._group, async_op=True)
            return lambda: _after(work, matrix, wait)[self.me].clone()  # noqa: PLW0108 - it waits when it is called
        line = torch.empty_like(matrix[0])
        work = _reduce_scatter(line, matrix.view(-1), group=self._group, async_op=True)
        return lambda: _after(work, line, wait)

    def gather_lines(self, line: Tensor, tag: int, what: str = "") -> Arrival:
        """Begin to collect every rank's ``line``, which must not change meanwhile. What arrives is a matrix of all."""
        self.begun["gather"] += 1
        if self._gathering is None:
            return lambda: line[None]
        came = line.new_empty((self.ranks, line.numel()))
        wait = waiting("gather of shards", what, self._gathering)
        if self._pairs:
            rows = start_all_gather(came, line, self._gathering, tag)
            return lambda: _after(rows, came, wait)
        work = _all_gather(came.view(-1), line, group=self._gathering, async_op=True)
        return lambda: _after(work, came, wait)

    def tell(self, numbers: Tensor) -> Tensor:
        """What the first of the ranks says, on all of them."""
        if self._gathering is not None:
            with waiting("order of gathers", "", self._gathering):
                dist.broadcast(numbers, dist.get_global_rank(self._gathering, 0), group=self._gathering)
        return numbers


def _added(came: Tensor) -> Tensor:
    total = came[0].clone()
    for line in came[1:]:
        total.add_(line)
    return total


def _after(work: PendingCollective | None, result: Tensor, wait: waiting) -> Tensor:
    assert work is not None
    with wait:
        work.wait()
    return result
