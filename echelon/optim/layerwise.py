"""Base class of LARS and LAMB: trust ratios from the norms of whole parameters, and excluded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from echelon.base.errors import UsageError
from echelon.optim.foreach import Bundle, ForeachOptimizer

if TYPE_CHECKING:
    from echelon.optim.fused import FusedKernels

PIECE = 1 << 16  # elements per part of a bundle on a CPU, which fit in the cache

#: (parameters, their squared norms as a 2 x n tensor) -> the same, summed over all shards of each parameter
SumSquares = Callable[[list[Tensor], Tensor], Tensor]


class LayerwiseOptimizer(ForeachOptimizer):
    """An optimizer that scales the learning rate of each parameter by a trust ratio.

    exclude:     parameters without weight decay and trust ratio
    fused:       True requires the fused kernel, False disables it, None uses it where it can run
    sum_squares: function that sums squared norms over the shards of each parameter. The engine sets it if it shards
                 parameters, because a trust ratio needs the norms of whole parameters.
    """

    sum_squares: SumSquares | None = None

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], exclude: Iterable[Tensor], fused: bool | None
    ) -> None:
        super().__init__(params, defaults)
        self._excluded, self._fused = self._known(exclude), fused
        self._fast: FusedKernels | None = None

    def __getstate__(self) -> dict[str, Any]:
        # torch's __getstate__ keeps only its own attributes. The tables of the fused kernel are rebuilt on demand.
        kept: dict[str, Any] = super().__getstate__()
        return kept | {
            "_excluded": self._excluded,
            "_fused": self._fused,
            "_fast": None,
            "sum_squares": self.sum_squares,
        }

    def excludes(self, parameter: Tensor) -> bool:
        """Return True if the parameter gets neither weight decay nor a trust ratio."""
        return parameter in self._excluded

    def _known(self, exclude: Iterable[Tensor]) -> set[Tensor]:
        owned = {param for group in self.param_groups for param in group["params"]}
        excluded = list(exclude)
        for tensor in excluded:
            if not isinstance(tensor, Tensor):
                raise UsageError(
                    f"{type(self).__name__}(exclude=...) takes parameters, got {tensor!r}; excluded_names() finds them "
                    "by name"
                )
            if tensor not in owned:
                raise UsageError(
                    f"{type(self).__name__}(exclude=...) holds a tensor of shape {tuple(tensor.shape)} that is not "
                    "among the optimizer's parameters"
                )
        return set(excluded)

    def _update(self, bundle: Bundle) -> None:
        adaptive = [param not in self._excluded for param in bundle.params]
        if self._fused is not False and self._fused_update(bundle, adaptive):
            return
        for kind in (True, False):
            part = bundle.picked([flag is kind for flag in adaptive])
            for piece in self._pieces(part):
                self._foreach_update(piece, kind)

    def _pieces(self, bundle: Bundle) -> Iterator[Bundle]:
        """Yield parts of the bundle; on a CPU they are small enough to stay in the cache between operations.

        A bundle of shards is not cut, because its norms are all-reduced and all ranks must issue the same collectives.
        """
        if bundle.params and (bundle.params[0].device.type != "cpu" or self.sum_squares):
            yield bundle
            return
        piece = Bundle(bundle.group, [], [], [])
        for param, grad, state in zip(bundle.params, bundle.grads, bundle.states, strict=True):
            piece.params.append(param)
            piece.grads.append(grad)
            piece.states.append(state)
            if sum(held.numel() for held in piece.params) >= PIECE:
                yield piece
                piece = Bundle(bundle.group, [], [], [])
        if piece.params:
            yield piece

    def _fused_update(self, bundle: Bundle, adaptive: list[bool]) -> bool:
        """Update the bundle with the fused kernel if that can run; return True if it did.

        Raises UsageError if ``fused=True`` was given and the kernel cannot run.
        """
        if self._fused is None and not bundle.params[0].is_cuda:
            return False  # the common case on a CPU: skips the import and the checks
        from echelon.optim.fused import FusedKernels, why_not

        reason = "its parameters are shards" if self.sum_squares else why_not(bundle)
        if reason is None:
            self._fast = self._fast or FusedKernels()
            reason = self._launch(self._fast, bundle, adaptive)
        if reason is not None and self._fused:
            raise UsageError(f"{type(self).__name__}(fused=True) cannot run: {reason}; use fused=None or fused=False")
        return reason is None

    def _launch(self, fast: FusedKernels, bundle: Bundle, adaptive: list[bool]) -> str | None:
        """Launch the fused kernel and return None, or return the reason why it cannot run."""
        raise NotImplementedError

    def _foreach_update(self, bundle: Bundle, adaptive: bool) -> None:
        raise NotImplementedError

    def _norms(self, params: list[Tensor], weights: list[Tensor], updates: list[Tensor]) -> Iterator[Tensor]:
        """Return |w| and |update| of every parameter as two vectors, which stay on the device."""
        both = torch.stack([torch.stack(list(torch._foreach_norm(tensors))) for tensors in (weights, updates)])
        if self.sum_squares is not None:
            both = self.sum_squares(params, both.square()).sqrt()
        return iter(both.unbind())


def add_scaled(targets: list[Tensor], tensors: list[Tensor], factors: Tensor) -> None:
    """Add the i-th factor times the i-th tensor to the i-th target, without copying the factors to the host."""
    torch._foreach_addcmul_(targets, tensors, list(factors.unbind()))
