"""``StepExtras``: numbers of a step that travel with its loss: ranks that have logged something, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.nn.packed import Packed

#: Name of the token ids in a batch of named inputs.
TOKEN_IDS = "input_ids"


class StepExtras:
    """This rank's extra numbers, and their sums over all ranks.

    pending: returns True if this rank has logged numbers to merge
    is_read: False on ranks where nothing reads the tokens
    """

    def __init__(self, pending: Callable[[], bool], is_read: bool = True) -> None:
        self._pending, self._is_read = pending, is_read
        self._has_tokens: bool | None = None  # None before the first batch
        self._copies = 1
        self._tokens: Tensor | float = 0.0
        self.pending: Tensor | float = 0.0  #: number of ranks with numbers to merge, as of the last step

    def join(self, copies: int, has_tokens: bool | None = None) -> None:
        """Set what is known before the first batch.

        copies:     number of ranks that are assumed to have as many tokens as this one, if it steps alone; else 1
        has_tokens: False if ids are no tokens; None: the first batch says so
        """
        self._copies, self._has_tokens = copies, has_tokens

    def own(self, inputs: Any = None, counts: bool = True) -> tuple[float, float]:
        """Return this rank's numbers.

        inputs: batch of this pass; None in a user's own loop
        counts: False if another rank counts the tokens of this batch
        """
        if self._has_tokens is None and inputs is not None:
            self._has_tokens = token_count(inputs) > 0
        return float(self._pending()), float(token_count(inputs)) if counts and self._has_tokens else 0.0

    def received(self, sums: tuple[Tensor | float, Tensor | float]) -> None:
        """Take in the sums over all ranks of one pass."""
        self.pending, tokens = sums
        if self._has_tokens and self._is_read:
            self._tokens = self._tokens + tokens * self._copies

    def take_tokens(self) -> Tensor | float | None:
        """Return the tokens of all ranks since the last call; None if batches have no tokens."""
        tokens, self._tokens = self._tokens, 0.0
        return tokens if self._has_tokens else None


def token_count(inputs: Any) -> int:
    """Return the tokens in a batch, padding included; 0 if it holds no token ids.

    Token ids are the row of a ``Packed``, ``input_ids`` by name, or a first input of ids, rows x tokens.
    """
    if isinstance(inputs, Packed):
        return int(inputs.values.shape[0])
    if isinstance(inputs, Mapping):
        ids = inputs.get(TOKEN_IDS)
        if isinstance(ids, Tensor):
            return ids.numel()
        inputs = tuple(inputs.values())
    first = inputs[0] if isinstance(inputs, tuple | list) and inputs else inputs
    if isinstance(first, Packed):
        return int(first.values.shape[0])
    is_ids = isinstance(first, Tensor) and first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
    return first.numel() if is_ids else 0
