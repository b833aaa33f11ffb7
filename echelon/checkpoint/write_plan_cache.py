"""Who writes what, remembered from save to save.

Planning 3,000 tensors on 8 ranks takes rank 0 a second, while training waits. The tensors of a run hardly ever change
in name or shape, so a rank that has nothing new to tell says so, and when no rank has, the last plan stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.checkpoint.write_plan import WritePiece, share_out


class WritePlanCache:
    """One rank's memory of the last plan that all ranks agreed on; on rank 0, of the whole plan."""

    def __init__(self) -> None:
        self._mine: list[WritePiece] | None = None
        self._my_share: list[int] = []
        self._offers: list[list[WritePiece]] = []
        self._proposed: list[list[WritePiece]] = []

    def offer(self, pieces: Sequence[WritePiece]) -> list[Any] | None:
        """What to tell rank 0 about this rank's pieces; ``None`` for the same as last time."""
        return None if pieces == self._mine else [piece.to_message() for piece in pieces]

    def allot(self, offers: Sequence[list[Any] | None]) -> list[list[int]] | None:
        """Rank 0: everyone's share, as positions in what they hold; ``None`` for the same as last time."""
        if all(offer is None for offer in offers):
            return None
        self._proposed = [
            self._offers[rank] if offer is None else [WritePiece.from_message(message) for message in offer]
            for rank, offer in enumerate(offers)
        ]
        return share_out(self._proposed)

    def settle(self, pieces: Sequence[WritePiece], shares: list[list[int]] | None, rank: int) -> list[int]:
        """This rank's share, once all ranks have agreed."""
        self._mine = list(pieces)
        if shares is not None:
            self._my_share, self._offers = shares[rank], self._proposed
        return self._my_share
