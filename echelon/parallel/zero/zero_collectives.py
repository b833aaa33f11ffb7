"""The two collectives of ZeRO sharding: reduce-scatter of gradients and all-gather of weights.

Where groups of replicas shard by themselves (HSDP), the lines of a reduce-scatter are then summed across the groups.

On Gloo with CPU tensors both are messages between pairs of ranks, distinguished by tags: their order does not matter,
and sums are computed in rank order. Otherwise they are collectives, which all ranks must start in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.activity import waiting
from echelon.distributed.collectives import start_all_gather, start_all_to_all, wait_for

# torch 2.13 renamed reduce_scatter_tensor and all_gather_into_tensor; 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Arrival = Callable[[], Tensor]  # waits for the result and returns it


class ShardCollectives:
    """Collectives among the ranks that shard the same parameters.

    group:     process group of these ranks; ``None`` if there is only one
    gathering: separate process group for weights, so that they may overtake gradients; default: ``group``
    across:    ranks of other groups that hold the same rows; ``None`` if there is one group
    everyone:  ranks of all groups; default: ``group``
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        gathering: dist.ProcessGroup | None = None,
        across: dist.ProcessGroup | None = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._gathering, self._across = group, gathering or group, across
        self.sharing = group  #: ranks that share the shards
        self._everyone = everyone or group
        self._beside: torch.cuda.Stream | None = None
        if across is not None and device.type == "cuda":
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.ranks = dist.get_world_size(group) if group else 1
        self.me = dist.get_rank(group) if group else 0
        self._gloo = group is not None and dist.get_backend(group) == "gloo"
        self._pairs = self._gloo and device.type == "cpu"
        self.begun: Counter[str] = Counter()  #: number of sums and gathers so far

    def sum_lines(self, matrix: Tensor, tag: int, what: str = "") -> Arrival:
        """Start the sum of all ranks' ``matrix``; the result is this rank's line of the sum, in new memory.

        The caller must not use ``matrix`` afterwards.
        """
        self.begun["sum"] += 1
        if self._group is None:
            return lambda: matrix[0]
        wait = waiting("sum of gradients", what, self._group)
        if self._pairs:
            received = torch.empty_like(matrix)
            swap = start_all_to_all(received, matrix, self._group, tag)
            return lambda: self._across_groups(_added(wait_for(swap, received, wait)), tag, what)
        if self._gloo:  # Gloo has no reduce-scatter for GPU tensors
            work = dist.all_reduce(matrix, group=self._everyone, async_op=True)
            return lambda: wait_for(work, matrix, wait)[self.me].clone()  # noqa: PLW0108 - the lambda delays the wait
        line = torch.empty_like(matrix[0])
        work = _reduce_scatter(line, matrix.view(-1), group=self._group, async_op=True)
        if self._across is not None:  # on a stream of its own, so that backward does not wait for the first sum
            with torch.cuda.stream(self._beside):
                work.wait()
                work = dist.all_reduce(line, group=self._across, async_op=True)
        return lambda: wait_for(work, line, wait)

    def _across_groups(self, line: Tensor, tag: int, what: str) -> Tensor:
        """Return the sum of the lines of all groups, in the order of groups."""
        if self._across is None:
            return line
        received = line.new_empty((dist.get_world_size(self._across), line.numel()))
        rows = start_all_gather(received, line, self._across, tag)
        return _added(wait_for(rows, received, waiting("sum of gradients across groups", what, self._across)))

    def gather_lines(self, line: Tensor, tag: int, what: str = "") -> Arrival:
        """Start the all-gather of ``line``, which must not change meanwhile; the result is a matrix of all lines."""
        self.begun["gather"] += 1
        if self._gathering is None:
            return lambda: line[None]
        received = line.new_empty((self.ranks, line.numel()))
        wait = waiting("gather of shards", what, self._gathering)
        if self._pairs:
            rows = start_all_gather(received, line, self._gathering, tag)
            return lambda: wait_for(rows, received, wait)
        work = _all_gather(received.view(-1), line, group=self._gathering, async_op=True)
        return lambda: wait_for(work, received, wait)

    def from_first(self, numbers: Tensor) -> Tensor:
        """Broadcast ``numbers`` from the first rank of the group, in place, and return them."""
        if self._gathering is not None:
            with waiting("order of gathers", "", self._gathering):
                dist.broadcast(numbers, dist.get_global_rank(self._gathering, 0), group=self._gathering)
        return numbers


def _added(received: Tensor) -> Tensor:
    total = received[0].clone()
    for line in received[1:]:
        total.add_(line)
    return total
