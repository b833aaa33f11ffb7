"""What LARS and LAMB share: a rate for each parameter from the norms of the whole of it, and parameters left out."""

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

PIECE = 1 << 16  # elements

#: (parameters, their squared norms as a 2 x n tensor) -> the same, summed over all shards of each parameter
SumSquares = Callable[[list[Tensor], Tensor], Tensor]


class LayerwiseOptimizer(ForeachOptimizer):
    """``exclude`` names tensors that get no weight decay and the plain learning rate.

    ``sum_squares`` is for parameters that are shards of larger ones: norms are those of whole parameters, so whoever
    splits one puts the sum over its shards here.
    """

    sum_squares: SumSquares | None = None

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], exclude: Iterable[Tensor], fused: bool | None
    ) -> None:
        super().__init__(params, defaults)
        self._excluded, self._fused = self._known(exclude), fused
        self._fast: FusedKernels | None = None

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only what it knows of; the tables of the fused step are made anew.
        kept: dict[str, Any] = super().__getstate__()
        return kept | {
            "_excluded": self._excluded,
            "_fused": self._fused,
            "_fast": None,
            "sum_squares": self.sum_squares,
        }

    def excludes(self, parameter: Tensor) -> bool:
        """Whether this one gets neither weight decay nor a rate of its own."""
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
        """On a CPU, bundles small enough that what one operation leaves in the cache the next one finds there.

        Shards are not cut: their sums go over ranks, which must all ask for the same ones.
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
        """Do it in one kernel where that is possible; say whether it was."""
        if self._fused is None and not bundle.params[0].is_cuda:
            return False  # the common case on a CPU, told apart for nothing
        from echelon.optim.fused import FusedKernels, why_not

        reason = "its parameters are shards" if self.sum_squares else why_not(bundle)
        if reason is None:
            self._fast = self._fast or FusedKernels()
            reason = self._launch(self._fast, bundle, adaptive)
        if reason is not None and self._fused:
            raise UsageError(f"{type(self).__name__}(fused=True) cannot run: {reason}; use fused=None or fused=False")
        return reason is None

    def _launch(self, fast: FusedKernels, bundle: Bundle, adaptive: list[bool]) -> str | None:
        """Run the one-kernel step, or say what keeps it from running."""
        raise NotImplementedError

    def _foreach_update(self, bundle: Bundle, adaptive: bool) -> None:
        raise NotImplementedError

    def _norms(self, params: list[Tensor], weights: list[Tensor], updates: list[Tensor]) -> Iterator[Tensor]:
        """|w| and |update| of every parameter, as two vectors. They stay on the device."""
        both = torch.stack([torch.stack(list(torch._foreach_norm(tensors))) for tensors in (weights, updates)])
        if self.sum_squares is not None:
            both = self.sum_squares(params, both.square()).sqrt()
        return iter(both.unbind())


def add_scaled(targets: list[Tensor], tensors: list[Tensor], factors: Tensor) -> None:
    """Add the i-th factor times the i-th tensor to the i-th target, without asking the device for the factors."""
    torch._foreach_addcmul_(targets, tensors, list(factors.unbind()))
