"""Linear layers that store their weight as inputs x outputs, such as ``Conv1D`` of GPT-2 in transformers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.parallel.tensor.linear import PartialSumOutput, RowParallelInput, column_output, fused_ranges
from echelon.parallel.tensor.sharded_activation import take_in
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, ranges_of, require_gather, widths
from echelon.strategy.annotations.marks import Split


def is_transposed_linear(module: nn.Module) -> bool:
    """Return True for a ``Conv1D``: ``x @ weight + bias``, with a weight of inputs x outputs."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        type(module).__name__ == "Conv1D"
        and "forward" not in module.__dict__
        and set(module._parameters) == {"weight", "bias"}
        and weight is not None
        and bias is not None
        and weight.dim() == 2
        and bias.shape == weight.shape[1:]
        and getattr(module, "nf", None) == weight.shape[1]
    )


class ColumnParallelTransposedLinear(nn.Module):
    axis: SplitAxis
    packs: tuple[Sizes, ...]
    gather: bool
    weight: Tensor
    bias: Tensor

    def forward(self, x: Any) -> Any:
        entered, rows = take_in(x, self.axis)
        local = F.linear(entered, self.weight.t(), self.bias)
        return column_output(local, rows, self.packs, self.axis, self.gather)


class RowParallelTransposedLinear(RowParallelInput, nn.Module):
    axis: SplitAxis
    sizes: Sizes
    leave: PartialSumOutput
    weight: Tensor
    bias: Tensor

    def forward(self, x: Any) -> Any:
        local, rows = self.own_input(x)
        return self.leave(F.linear(local, self.weight.t()), rows, self.bias)


def transposed_linear_pieces(module: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    inputs, outputs = module.get_parameter("weight").shape
    if mark.how == "row":
        require_gather(mark, "a layer split by rows")
        if mark.parts is not None:
            raise UnsplittableError("has split(parts=...), which are parts of outputs; a row split cuts the inputs")
        ranges = ranges_of(inputs, mark, axis)
        facts: dict[str, Any] = {"axis": axis, "sizes": widths(ranges), "leave": PartialSumOutput(mark, axis)}
        partial = ("bias",) if mark.sequence else ()
        return [SplitSpec(module, RowParallelTransposedLinear, facts, {"weight": {0: (ranges[axis.rank],)}}, partial)]
    own, packs = fused_ranges(outputs, mark, axis)
    facts = {"axis": axis, "packs": packs, "gather": mark.gather}
    return [SplitSpec(module, ColumnParallelTransposedLinear, facts, {"weight": {1: own}, "bias": {0: own}})]
