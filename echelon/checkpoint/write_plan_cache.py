"""Caches the write plan from save to save.

Planning 3,000 tensors on 8 ranks takes a second on rank 0, while training waits. The tensors of a run hardly ever
change in name or shape, so a rank without changes sends None, and if all ranks do, the last plan is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.checkpoint.write_plan import share_out
from echelon.distributed.tensor_region import TensorRegion


class WritePlanCache:
    """One rank's copy of the last plan that all ranks agreed on; on rank 0, the whole plan."""

    def __init__(self) -> None:
        self._own: list[TensorRegion] | None = None
        self._my_share: list[int] = []
        self._offers: list[list[TensorRegion]] = []
        self._proposed: list[list[TensorRegion]] = []

    def offer(self, pieces: Sequence[TensorRegion]) -> list[Any] | None:
        """Return this rank's pieces for rank 0; ``None`` if they are the same as last time."""
        return None if pieces == self._own else [piece.to_json() for piece in pieces]

    def allot(self, offers: Sequence[list[Any] | None]) -> list[list[int]] | None:
        """Return all ranks' shares as positions in their pieces, on rank 0; ``None`` if they are as last time."""
        if all(offer is None for offer in offers):
            return None
        self._proposed = [
            self._offers[rank] if offer is None else [TensorRegion.from_json(plain) for plain in offer]
            for rank, offer in enumerate(offers)
        ]
        return share_out(self._proposed)

    def accept(self, pieces: Sequence[TensorRegion], shares: list[list[int]] | None, rank: int) -> list[int]:
        """Store the agreed plan, and return this rank's share."""
        self._own = list(pieces)
        if shares is not None:
            self._my_share, self._offers = shares[rank], self._proposed
        return self._my_share
