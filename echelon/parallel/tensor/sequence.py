"""Sequence parallelism for position-wise modules (layer norms, dropout, activations): dimension 1 is split."""

from __future__ import annotations

from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.parallel.tensor.rng import rank_local_rng
from echelon.parallel.tensor.sharded_activation import slice_up
from echelon.parallel.tensor.split_axis import SplitAxis
from echelon.parallel.tensor.split_spec import SplitSpec, UnsplittableError, ranges_of, require_gather
from echelon.strategy.annotations.marks import Split

_LAYER_NORMS = (nn.LayerNorm, nn.RMSNorm)
_DROPOUTS = (nn.Dropout, nn.AlphaDropout)

#: Modules whose output depends on several positions, or on several samples.
_NOT_POSITIONWISE = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Flatten,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)


class SequenceParallelMixin(nn.Module):
    """Mixin that runs a module with one input on this rank's part of the sequence.

    The gradients of the module's parameters are then partial sums over the ranks.
    """

    axis: SplitAxis
    mark: Split
    draws: bool

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        part = slice_up(self._checked(x), 1, self.axis, self.mark.weights)
        with rank_local_rng(self.axis, part.device, wanted=self.draws and self.training):
            local = super().forward(part.local, *args, **kwargs)
        return part.like(local)

    def _checked(self, x: Any) -> Any:
        normalized = len(self.normalized_shape) if isinstance(self, _LAYER_NORMS) else 0
        if x.dim() < 2 or normalized > x.dim() - 2:
            raise UsageError(
                f'split(how="sequence") of {type(self).__name__} cuts dimension 1, but the input is '
                f"{x.dim()}-dimensional; leave the mark out"
            )
        return x


def sequence_pieces(module: nn.Module, mark: Split, axis: SplitAxis) -> list[SplitSpec]:
    require_gather(mark, "a sequence layer")
    ranges_of(axis.size, mark, axis)
    mixing = [type(child).__name__ for child in module.modules() if isinstance(child, _NOT_POSITIONWISE)]
    if mixing:
        raise UnsplittableError(
            f'treats positions together ({mixing[0]}), so split(how="sequence") cannot cut them apart'
        )
    draws = any(isinstance(child, _DROPOUTS) for child in module.modules())
    facts = {"axis": axis, "mark": mark, "draws": draws}
    return [
        SplitSpec(module, SequenceParallelMixin, facts, partial=tuple(name for name, _ in module.named_parameters()))
    ]
