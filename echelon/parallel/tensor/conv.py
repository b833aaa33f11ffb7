"""Convolutions split by output channels ("column") or input channels ("row"); they form pairs as linear layers do."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.parallel.tensor.linear import PartialSumOutput
from echelon.parallel.tensor.sharded_activation import ShardedActivation, take_in, take_part
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_spec import (
    SplitSpec,
    UnsplittableError,
    ranges_of,
    require_gather,
    require_own_forward,
    widths,
)
from echelon.strategy.annotations.marks import Split


class ColumnParallelConv2d(nn.Conv2d):
    """A convolution split by output channels. With groups, each rank has whole groups and only their input channels."""

    axis: SplitAxis
    sizes: Sizes
    gather: bool

    def forward(self, x: Any) -> Any:
        if self.groups == 1:
            local, rows = take_in(x, self.axis)
        else:
            each = self.in_channels // self.groups
            groups = self.axis.sizes(self.groups)
            local, rows = take_part(x, -3, tuple(each * count for count in groups), self.axis)
        out = _convolve(self, local, self.bias, groups=max(1, self.groups // self.axis.size))
        return ShardedActivation(out, -3, self.sizes, self.axis, rows) if self.gather else out


class RowParallelConv2d(nn.Conv2d):
    """A convolution split by input channels."""

    axis: SplitAxis
    sizes: Sizes
    leave: PartialSumOutput

    def forward(self, x: Any) -> Any:
        local, rows = take_part(x, -3, self.sizes, self.axis)
        bias = None if self.bias is None else self.bias[:, None, None]
        return self.leave(_convolve(self, local, None, groups=1), rows, bias)


def _convolve(conv: nn.Conv2d, x: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Compute the convolution as nn.Conv2d does, but with another number of groups."""
    padding: Any = conv.padding
    if conv.padding_mode != "zeros":
        x, padding = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
    return F.conv2d(x, conv.weight, bias, conv.stride, padding, conv.dilation, groups)


def conv_pieces(module: nn.Conv2d, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    require_own_forward(module, nn.Conv2d)
    if mark.sequence:
        raise UnsplittableError("has split(sequence=True), but a convolution has no sequence; leave it out")
    by_row = mark.how == "row"
    ranges = ranges_of(module.in_channels if by_row else module.out_channels, mark, axis)
    if min(widths(ranges)) == 0:
        raise UnsplittableError(f"has fewer channels than the {axis.size} devices it would be split over")
    if module.groups > 1 and (by_row or module.groups % axis.size or mark.weights):
        raise UnsplittableError(
            f"has groups={module.groups}, which {axis.size} devices can share only by whole groups: a multiple of the "
            "number of devices, split by columns, without weights"
        )
    local = (ranges[axis.rank],)
    facts: dict[str, Any] = {"axis": axis, "sizes": widths(ranges)}
    if by_row:
        require_gather(mark, "a layer split by rows")
        return [
            SplitSpec(
                module, RowParallelConv2d, {**facts, "leave": PartialSumOutput(mark, axis)}, {"weight": {1: local}}
            )
        ]
    return [
        SplitSpec(
            module, ColumnParallelConv2d, {**facts, "gather": mark.gather}, {"weight": {0: local}, "bias": {0: local}}
        )
    ]
