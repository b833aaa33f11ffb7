"""Reuse fake tensors that replace, in the user's forward, the tensors that a stage does not need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.parallel.pipeline.inter_stage_cache import MOST_KNOWN, is_changed, lend
from echelon.plan.fake_forward import as_module_output, placeholder


class PlaceholderPool:
    """Fake tensors of one stage and micro-batch, reused in every step.

    Creating one takes torch 0.4 ms, which was half of the time of a small model's interleaved step.
    """

    def __init__(self, known: dict[Hashable, Tensor], borrower: tuple[int, int]) -> None:
        self._known, self.borrower = known, borrower
        self._out: list[Hashable] = []

    def given(self, key: str, like: Tensor) -> Tensor:
        """Return a fake tensor for a part of the batch."""
        return self._lend(key, like, placeholder)

    def made(self, key: str, like: Tensor) -> Tensor:
        """Return a fake tensor for an output of a unit."""
        return self._lend(key, like, fresh_placeholder)

    def all_made(self, prefix: str, leaves: Sequence[Any]) -> list[Any]:
        """Return fake tensors for all tensors among the outputs of a unit."""
        return [
            self.made(f"{prefix}/{at}", leaf) if isinstance(leaf, Tensor) else leaf for at, leaf in enumerate(leaves)
        ]

    def _lend(self, key: str, like: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if like.layout != torch.strided:
                return make(like)
            look = (self.borrower, key, torch.is_grad_enabled(), like.shape, like.stride(), like.dtype, like.device)
            self._out.append(look)
            found = self._known.get(look)
            if found is None:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                found = self._known[look] = lend(make(like))
            return found

    def settle(self) -> None:
        """Drop, at the end of a pass, fake tensors that user code changed in place.

        Such a tensor would keep alive the tensors that were written into it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for look in self._out:
                lent = self._known.get(look)
                if lent is not None and is_changed(lent):
                    del self._known[look]


def fresh_placeholder(leaf: Tensor) -> Tensor:
    """Return a fake tensor like ``leaf``, with a grad_fn as the output of a unit has."""
    return as_module_output(placeholder(leaf))
