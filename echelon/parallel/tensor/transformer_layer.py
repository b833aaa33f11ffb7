"""Split transformer layers, and Sequentials of splittable layers, as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from echelon.parallel.tensor.sequence import sequence_pieces
from echelon.parallel.tensor.sharded_activation import slice_up
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, require_gather
from echelon.strategy.annotations.marks import Split

Planner = Callable[[nn.Module, Split, SplitAxis], list[SplitSpec]]

_POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity, nn.Dropout,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip
_NORMS = (nn.LayerNorm, nn.RMSNorm)


class SplitTransformerLayer(nn.Module):
    """A transformer layer whose parts are split.

    torch's fast path for inference reads the weights directly. It is disabled by reporting an unknown activation.
    """

    axis: SplitAxis
    mark: Split
    activation_relu_or_gelu = property(lambda self: 0)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        # The input is sliced once, so that all uses inside the layer share the slice.
        entering = slice_up(x, 1, self.axis, self.mark.weights) if self.mark.sequence else x
        return super().forward(entering, *args, **kwargs)


def layer_pieces(plan: Planner, layer: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    """Split attention by heads, and the two linear layers as a column-row pair."""
    if mark.how != "auto":
        raise UnsplittableError(f'is split as a block; leave out how="{mark.how}"')
    require_gather(mark, "a block")
    pieces = [SplitSpec(layer, SplitTransformerLayer, {"axis": axis, "mark": mark})]
    for child in layer.children():
        if isinstance(child, nn.MultiheadAttention):
            pieces += plan(child, mark, axis)
        elif mark.sequence and isinstance(child, _NORMS):
            pieces += sequence_pieces(child, replace(mark, how="sequence", sequence=False), axis)
    first, second = getattr(layer, "linear1", None), getattr(layer, "linear2", None)
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    return [*pieces, *plan(first, replace(mark, how="column"), axis), *plan(second, replace(mark, how="row"), axis)]


def stack_pieces(plan: Planner, stack: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    """Split every layer of a TransformerEncoder or TransformerDecoder."""
    if mark.how != "auto":
        raise UnsplittableError(f'is split as a block; leave out how="{mark.how}"')
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    inside = [module for module in stack.modules() if isinstance(module, layers)]
    return [piece for layer in inside for piece in plan(layer, mark, axis)]


# ---- Sequential ----


def sequential_pieces(plan: Planner, chain: nn.Sequential, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    """Split linear and convolution layers by columns and rows in turn, if only pointwise layers are between them.

    A layer that has no split of its own stays whole.
    """
    if mark.how != "auto":
        raise UnsplittableError(f'is split as a block; leave out how="{mark.how}"')
    require_gather(mark, "a Sequential")
    pieces: list[SplitSpec] = []
    layers, opened = _links(chain), None
    for layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            by_row = opened is type(layer) and getattr(layer, "groups", 1) == 1
            pieces += plan(layer, _link_mark(layer, mark, "row" if by_row else "column"), axis)
            opened = None if by_row else type(layer)  # a grouped convolution takes and returns split channels
        elif not isinstance(layer, _POINTWISE):
            pieces += _between(plan, layer, mark, axis)
            opened = None
    if not pieces:
        raise UnsplittableError("holds no layer that can be split")
    return pieces


def _link_mark(layer: nn.Module, mark: Split, how: Any) -> Split:
    return replace(mark, how=how, sequence=mark.sequence and isinstance(layer, nn.Linear))


def _links(chain: nn.Sequential) -> list[nn.Module]:
    """Return the layers in order, including those of nested Sequentials."""
    result: list[nn.Module] = []
    for child in chain:
        result += _links(child) if isinstance(child, nn.Sequential) else [child]
    return result


def _between(plan: Planner, layer: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    if mark.sequence and isinstance(layer, _NORMS):
        return sequence_pieces(layer, replace(mark, how="sequence", sequence=False), axis)
    try:
        return plan(layer, mark, axis)
    except UnsplittableError:
        if isinstance(layer, nn.Embedding) or any(True for _ in layer.children()):  # must not silently stay whole
            raise
        return []
