"""Unit of parameters that are unsharded only while they are used; otherwise each rank holds its rows only.

While sharded, a parameter keeps its shape but is a single expanded NaN: code that uses the parameter then, bypassing
its module, gets a non-finite loss instead of an access to freed memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from echelon.distributed.activity import span
from echelon.parallel.zero.row_partition import RowMatrix, RowPartition
from echelon.parallel.zero.zero_collectives import Arrival, ShardCollectives

TAG = 1 << 21  # distinct from the tags of gradients
Offload = Literal["optimizer", "parameters"] | None


class ShardUnit:
    """Parameters that are unsharded and resharded together. ``holders`` counts the current users."""

    def __init__(
        self,
        name: str,
        number: int,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, RowPartition],
        exchange: ShardCollectives,
        offload: Offload,
    ) -> None:
        self.name, self.number, self.parameters = name, number, parameters
        self._buffers = [
            UnitFlatBuffer(
                {n: parameters[n] for n in names}, [cuts[n] for n in names], exchange, offload, TAG + 4 * number + i
            )
            for i, names in enumerate(_by_dtype(parameters))
        ]
        self.shards = {name: shard for buffer in self._buffers for name, shard in buffer.shards.items()}
        self._exchange = exchange
        self.holders = 0
        self.coming: list[Arrival] | None = None
        self.wholes: list[tuple[nn.Parameter, Tensor]] = []  #: while unsharded, each parameter's memory
        self.embedding_only = False

    @property
    def here(self) -> bool:
        return bool(self.wholes)

    @property
    def bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters.values())

    def begin(self) -> list[Arrival]:
        """Start the all-gathers of the unit's rows; all ranks call this."""
        return [buffer.gather() for buffer in self._buffers]

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for the all-gathers and set the parameters to the whole tensors."""
        assert self.coming is not None
        arrivals, self.coming = self.coming, None
        for buffer, arrival in zip(self._buffers, arrivals, strict=True):
            self.wholes += buffer.unpack(arrival())

    def leave(self) -> None:
        self.wholes = []
        for buffer in self._buffers:
            buffer.leave()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the whole parameters, which were changed equally on all ranks, into this rank's rows."""
        for buffer in self._buffers:
            buffer.write_back()

    def stepped(self) -> None:
        """Update the flat buffers after the shards have changed."""
        for buffer in self._buffers:
            buffer.stepped()


class UnitFlatBuffer:
    """The unit's parameters of one dtype. This rank's rows are contiguous in one flat buffer, ready to be sent."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Sequence[RowPartition],
        exchange: ShardCollectives,
        offload: Offload,
        tag: int,
    ) -> None:
        self._parameters, self._exchange, self._tag = list(parameters.values()), exchange, tag
        self._rows, self._what = RowMatrix(cuts), span(list(parameters))
        self._strides = [p.stride() if _dense(p) else None for p in self._parameters]
        first = self._parameters[0]
        self._device, self._away = first.device, _nothing(first)
        away_from_device = offload is not None and first.device.type != "cpu"
        self._line = torch.zeros(
            self._rows.length, dtype=first.dtype, device="cpu" if away_from_device else first.device,
            pin_memory=away_from_device and first.device.type == "cuda",
        )  # fmt: skip
        # The optimizer steps on the host; with offload="optimizer" there is a copy of the rows on the device too.
        self._copy = (
            torch.empty_like(self._line, device=first.device) if away_from_device and offload == "optimizer" else None
        )
        self._views = self._rows.views(self._line, exchange.me)
        self.shards: dict[str, nn.Parameter] = {}
        self.write_back()
        # ``data`` has its own version counter: with views of one line, a step of one optimizer would bump all of them.
        self.shards = {
            name: nn.Parameter(view.data, requires_grad=p.requires_grad)
            for (name, p), view in zip(parameters.items(), self._views, strict=True)
        }

    @torch.no_grad()
    def write_back(self) -> None:
        parts = self._rows.parts([p.data for p in self._parameters], self._exchange.me)
        for view, part in zip(self._views, parts, strict=True):
            view.copy_(part)
        torch.autograd.graph.increment_version(list(self.shards.values()))
        self._copy_up()

    def gather(self) -> Arrival:
        line = self._line if self._copy is None else self._copy
        return self._exchange.gather_lines(line.to(self._device, non_blocking=True), self._tag, self._what)

    def unpack(self, matrix: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        wholes = [_like(p, strides) for p, strides in zip(self._parameters, self._strides, strict=True)]
        self._rows.read(matrix, wholes)
        for parameter, whole in zip(self._parameters, wholes, strict=True):
            parameter.data = whole
        return list(zip(self._parameters, wholes, strict=True))

    def leave(self) -> None:
        for parameter in self._parameters:
            parameter.data = self._away.expand(parameter.shape)

    @torch.no_grad()
    def stepped(self) -> None:
        for shard, view in zip(self.shards.values(), self._views, strict=True):
            if shard.data_ptr() != view.data_ptr():  # user code or an optimizer has replaced the shard's memory
                view.copy_(shard)
                shard.data = view
        self._copy_up()

    def _copy_up(self) -> None:
        if self._copy is not None:
            self._copy.copy_(self._line, non_blocking=True)


def _by_dtype(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    result: dict[torch.dtype, list[str]] = {}
    for name, parameter in parameters.items():
        result.setdefault(parameter.dtype, []).append(name)
    return list(result.values())


def _dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _like(parameter: nn.Parameter, strides: tuple[int, ...] | None) -> Tensor:
    """Allocate memory for the whole parameter in its original layout (channels-last stays so)."""
    if strides is None:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device)


def _nothing(parameter: nn.Parameter) -> Tensor:
    kind = parameter.dtype
    value = float("nan") if kind.is_floating_point or kind.is_complex else torch.iinfo(kind).min
    return torch.full((), value, dtype=kind, device=parameter.device)
