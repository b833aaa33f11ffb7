"""Experts that a module of another library stacks in two parameters: each rank holds a part of every expert's width.

The gate and up projections of all experts are one parameter (experts x 2 widths x features), and the down projections
another one (experts x features x width). The module's own forward runs on this rank's widths, and the outputs are
summed over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.distributed.tensor_layout import Range
from echelon.parallel.tensor.lazy_activation import whole
from echelon.parallel.tensor.mappings import reduce_from_split, used_in_parts
from echelon.parallel.tensor.sharded_activation import take_in
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, ranges_of, require_gather
from echelon.strategy.annotations.marks import Split

UP, DOWN = "gate_up_proj", "down_proj"


def has_stacked_experts(module: nn.Module) -> bool:
    """Return True if the module's parameters are stacked gate and up projections, and down projections."""
    up, down = module._parameters.get(UP), module._parameters.get(DOWN)
    return up is not None and down is not None and up.dim() == down.dim() == 3


class SplitStackedExperts(nn.Module):
    axis: SplitAxis

    def forward(self, hidden: Any, *routing: Any, **named: Any) -> Any:
        entered, rows = take_in(hidden, self.axis)
        # Each rank computes with these numbers for its own widths, so their gradients are partial sums.
        routing, named = whole((routing, named))
        given = [_used_in_parts(each, self.axis) for each in routing]
        output = super().forward(entered, *given, **{key: _used_in_parts(x, self.axis) for key, x in named.items()})
        return reduce_from_split(output, rows, self.axis)


def _used_in_parts(value: Any, axis: SplitAxis) -> Any:
    return used_in_parts(value, axis) if getattr(value, "requires_grad", False) else value


def stacked_expert_pieces(module: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    if mark.how != "auto" or mark.sequence:
        raise UnsplittableError("has stacked experts, which are split by their width; use split() without options")
    require_gather(mark, "a module with stacked experts")
    if axis.batch_per_rank:
        raise UnsplittableError("has stacked experts, and replicate beside split joins batches; leave them whole")
    up, down = module.get_parameter(UP), module.get_parameter(DOWN)
    experts, features, width = down.shape
    order = up.shape == (experts, 2 * width, features)
    plain = set(module._parameters) == {UP, DOWN} and not any(True for each in module.children() if _has_state(each))
    if not order or not plain or not getattr(module, "is_concatenated", True):
        raise UnsplittableError(
            "has stacked experts in another form than experts x 2 widths x features and experts x features x width, "
            "without bias; leave them whole"
        )
    begin, end = ranges_of(width, mark, axis)[axis.rank]
    cuts: dict[str, dict[int, tuple[Range, ...]]] = {
        UP: {1: ((begin, end), (width + begin, width + end))},
        DOWN: {2: ((begin, end),)},
    }
    return [SplitSpec(module, SplitStackedExperts, {"axis": axis}, cuts)]


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.children())
