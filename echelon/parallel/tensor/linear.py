"""Linear layers split by columns (outputs) or rows (inputs).

A column layer returns a ShardedActivation, whose local part a row layer uses directly: the pair needs one all-reduce
forward and one backward.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.tensor_layout import Range
from echelon.parallel.tensor.fused_activation import FusedActivation
from echelon.parallel.tensor.mappings import reduce_from_split, reduce_scatter_to_split
from echelon.parallel.tensor.sharded_activation import ShardedActivation, take_in, take_part
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_spec import (
    SplitSpec,
    UnsplittableError,
    part_widths,
    ranges_of,
    require_gather,
    require_own_forward,
    widths,
)
from echelon.strategy.annotations.marks import Split


class PartialSumOutput:
    """Sums the partial outputs of a layer over ranks: to the whole output, or to each rank's part of the sequence."""

    def __init__(self, mark: Split, axis: SplitAxis) -> None:
        self._axis, self._sequence, self._weights = axis, mark.sequence, mark.weights

    def __call__(self, local: Tensor, rows: Sizes | None, bias: Tensor | None) -> Any:
        """Return the summed output; ``bias`` is added once, after the sum."""
        if not self._sequence:
            return _plus(reduce_from_split(local, rows, self._axis), bias)
        if local.dim() < 3:
            raise UsageError(
                f"split(sequence=True) cuts dimension 1, but the activations are {local.dim()}-dimensional; "
                "leave sequence out, or give batch x sequence x features"
            )
        sizes = self._axis.sizes(local.shape[1], self._weights)
        part = reduce_scatter_to_split(local, 1, sizes, self._axis)
        return ShardedActivation(_plus(part, bias), 1, sizes, self._axis)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def column_output(local: Tensor, rows: Sizes | None, packs: tuple[Sizes, ...], axis: SplitAxis, gather: bool) -> Any:
    """Return this rank's outputs of a layer split by outputs, as an activation that looks whole.

    packs:  for each part of a fused layer, the sizes of all ranks' outputs; one for other layers
    gather: False returns the plain local tensor
    """
    axis.memory.parts_about |= not gather
    if not gather:
        return local
    if len(packs) > 1:
        return FusedActivation(local, -1, packs, axis, rows)
    return ShardedActivation(local, -1, packs[0], axis, rows)


class ColumnParallelLinear(nn.Linear):
    axis: SplitAxis
    packs: tuple[Sizes, ...]
    gather: bool

    def forward(self, x: Any) -> Any:
        entered, rows = take_in(x, self.axis)
        return column_output(F.linear(entered, self.weight, self.bias), rows, self.packs, self.axis, self.gather)


class RowParallelInput:
    """Finds this rank's part of the input of a layer split by inputs."""

    axis: SplitAxis
    sizes: Sizes

    def own_input(self, x: Any) -> tuple[Tensor, Sizes | None]:
        local = self.sizes[self.axis.rank]
        if self.axis.memory.parts_about and isinstance(x, Tensor) and x.shape[-1] == local != sum(self.sizes):
            return x, known_rows(x, self.axis)
        return take_part(x, -1, self.sizes, self.axis)


class RowParallelLinear(RowParallelInput, nn.Linear):
    leave: PartialSumOutput

    def forward(self, x: Any) -> Any:
        local, rows = self.own_input(x)
        return self.leave(F.linear(local, self.weight), rows, self.bias)


def known_rows(local: Tensor, axis: SplitAxis) -> Sizes | None:
    """Return the rows of each rank in a plain local tensor: in spread mode those that entered last, else None."""
    rows = axis.memory.rows
    if not axis.batch_per_rank:
        return None
    if rows is None or sum(rows) != local.shape[0]:
        raise UsageError(
            f"split beside replicate: {local.shape[0]} rows of a local part are not those of the split layer before "
            f"({rows}); keep dimension 0, or leave gather=False out"
        )
    return rows


def linear_pieces(module: nn.Linear, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    require_own_forward(module, nn.Linear)
    if mark.how == "row":
        return [row_linear(module, mark, axis)]
    own, packs = fused_ranges(module.out_features, mark, axis)
    facts = {"axis": axis, "packs": packs, "gather": mark.gather}
    return [SplitSpec(module, ColumnParallelLinear, facts, {"weight": {0: own}, "bias": {0: own}})]


def fused_ranges(outputs: int, mark: Split, axis: SplitAxis) -> tuple[tuple[Range, ...], tuple[Sizes, ...]]:
    """Return this rank's range of the outputs of each part, and the sizes of all ranks' ranges.

    A layer without ``split(parts=...)`` has one part.
    """
    own, packs, begin = [], [], 0
    for width in part_widths(outputs, mark):
        ranges = ranges_of(width, mark, axis)
        own.append((begin + ranges[axis.rank][0], begin + ranges[axis.rank][1]))
        packs.append(widths(ranges))
        begin += width
    return tuple(own), tuple(packs)


def row_linear(module: nn.Linear, mark: Split, axis: SplitAxis) -> SplitSpec:
    require_gather(mark, "a layer split by rows")
    if mark.parts is not None:
        raise UnsplittableError("has split(parts=...), which are parts of outputs; a row split cuts the inputs")
    ranges = ranges_of(module.in_features, mark, axis)
    facts = {"axis": axis, "sizes": widths(ranges), "leave": PartialSumOutput(mark, axis)}
    partial = ("bias",) if mark.sequence and module.bias is not None else ()
    return SplitSpec(module, RowParallelLinear, facts, {"weight": {1: (ranges[axis.rank],)}}, partial)
