"""ZeRO levels 1 and 2: parameters stay whole on every rank; each rank updates its rows, which are then all-gathered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.parallel.zero.row_partition import RowMatrix, RowPartition
from echelon.parallel.zero.zero_collectives import Arrival, ShardCollectives

TAG = 1 << 22
UNDER_WAY = 2


class ReplicatedParams:
    """Whole parameters, and shards that are views of this rank's rows, or copies of them in host memory."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, RowPartition],
        buckets: Mapping[str, Sequence[Sequence[str]]],
        exchange: ShardCollectives,
        offload: bool,
    ) -> None:
        self._parameters, self._cuts, self._exchange = parameters, cuts, exchange
        self.shards = {name: self._shard(name, offload) for name in cuts}
        numbers = itertools.count()
        self._trained = {
            key: [self._batch(names, next(numbers)) for names in lists] for key, lists in buckets.items()
        }  # by optimizer
        trained = {name for lists in buckets.values() for names in lists for name in names}
        self._rest = [self._batch((name,), next(numbers)) for name in sorted(set(cuts) - trained)]

    def hand_round(self, optimizers: Iterable[str]) -> None:
        """All-gather the rows of the parameters that these optimizers train.

        Other parameters are not written, because a graph whose backward is still to come may need them.
        """
        self._hand_round([batch for key in optimizers for batch in self._trained[key]])

    def hand_round_all(self) -> None:
        """All-gather the rows of all parameters, including frozen ones."""
        self._hand_round([*itertools.chain.from_iterable(self._trained.values()), *self._rest])

    def _hand_round(self, batches: Iterable[_ParamBucket]) -> None:
        under_way: list[tuple[_ParamBucket, Arrival]] = []
        for batch in batches:
            under_way.append((batch, batch.begin()))
            if len(under_way) > UNDER_WAY:
                _finish(*under_way.pop(0))
        for batch, arrival in under_way:
            _finish(batch, arrival)

    def _shard(self, name: str, offload: bool) -> nn.Parameter:
        parameter = self._parameters[name]
        rows = self._cuts[name].of(parameter.data, self._exchange.me)
        if offload and rows.device.type != "cpu":
            rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda).copy_(rows)
        return nn.Parameter(rows, requires_grad=parameter.requires_grad)

    def _batch(self, names: Sequence[str], number: int) -> _ParamBucket:
        parameters = [self._parameters[name] for name in names]
        shards = [self.shards[name] for name in names]
        return _ParamBucket(
            parameters, shards, RowMatrix([self._cuts[name] for name in names]), self._exchange, TAG + number
        )


class _ParamBucket:
    """Parameters of one dtype whose rows are sent in one message."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shards: Sequence[nn.Parameter],
        rows: RowMatrix,
        exchange: ShardCollectives,
        tag: int,
    ) -> None:
        self._parameters = parameters
        self._shards = shards
        self._rows = rows
        self._exchange = exchange
        self._tag = tag

    @torch.no_grad()
    def begin(self) -> Arrival:
        first, me = self._parameters[0], self._exchange.me
        line = torch.zeros(self._rows.length, dtype=first.dtype, device=first.device)
        for place, shard in zip(self._rows.views(line, me), self._shards, strict=True):
            place.copy_(shard, non_blocking=True)
        self._follow(line)
        return self._exchange.gather_lines(line, self._tag)

    def _follow(self, line: Tensor) -> None:
        """Copy ``line`` into this rank's rows of those parameters whose shards are not views of them (any more)."""
        parts = self._rows.parts([p.data for p in self._parameters], self._exchange.me)
        for part, place, shard in zip(parts, self._rows.views(line, self._exchange.me), self._shards, strict=True):
            if part.data_ptr() != shard.data_ptr():
                part.copy_(place)
                if shard.device == part.device:
                    shard.data = part

    @torch.no_grad()
    def read(self, matrix: Tensor) -> None:
        self._rows.read(matrix, [p.data for p in self._parameters], but=self._exchange.me)
        torch.autograd.graph.increment_version(self._parameters)


def _finish(batch: _ParamBucket, arrival: Arrival) -> None:
    batch.read(arrival())
