"""``SnapshotLayout``: what one rank copies after a step, and where in a slot each piece of it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from echelon.checkpoint.in_memory.snapshot_buffer import SnapshotBuffer
from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.checkpoint.in_memory.snapshot_pieces import (
    ELSEWHERE,
    PieceHolders,
    PlacedPiece,
    SnapshotPiece,
    is_mine,
    only_here,
    pieces_of,
    place_pieces,
)
from echelon.distributed.tensor_layout import Part
from echelon.engine.in_memory.state_sources import StateSources


class SnapshotLayout:
    """This rank's share of the state.

    sent:    bytes at the beginning of a slot that only this host has
    nbytes:  of all its tensors together
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor | Part],
        sources: StateSources,
        holders: PieceHolders,
        where: SnapshotHosts,
        rank: int,
    ) -> None:
        found = [
            (piece, view, holders.of(name, value, sources.parameter_of(name)))
            for name, value in tensors.items()
            for piece, view in pieces_of(name, value)
        ]
        mine = is_mine([(piece, alike) for piece, _, alike in found], where, rank)
        copied = [each for each, is_ours in zip(found, mine, strict=True) if is_ours]
        copied.sort(key=lambda each: not only_here(each[2], where))
        lonely = [piece for piece, _, alike in copied if only_here(alike, where)]
        first, self.sent = place_pieces(lonely)
        rest, self.nbytes = place_pieces([piece for piece, _, _ in copied[len(lonely) :]], self.sent)
        others = [
            PlacedPiece(piece, ELSEWHERE) for (piece, _, _), is_ours in zip(found, mine, strict=True) if not is_ours
        ]
        self.placed = [*first, *rest]
        self.table = [*self.placed, *others]
        #: of those that are sent, all others being elsewhere
        self.sent_table = [*first, *(PlacedPiece(piece, ELSEWHERE) for piece, _ in rest), *others]
        self.views = [view for _, view, _ in copied]
        self._fresh = {piece.name: at for at, (piece, _, _) in enumerate(copied) if piece.name.startswith("rng.")}
        self._steady = [
            at for at, (piece, _, _) in enumerate(copied) if piece.name.startswith(("model.", "optimizer."))
            and (sources.parameter_of(piece.name) or sources.is_parameter(piece.name.removeprefix("model.")))
        ]  # fmt: skip

    def refresh(self, random: Mapping[str, Tensor]) -> None:
        """Random streams are given anew each time."""
        for name, value in random.items():
            self.views[self._fresh[name]] = value

    def inside(self, bank: SnapshotBuffer) -> list[list[Tensor]]:
        """Where the pieces go, as tensors in the memory of the bank: one list a slot."""
        whole = torch.frombuffer(bank.memory, dtype=torch.uint8)
        return [[_view(whole, bank.data(slot), each) for each in self.placed] for slot in (0, 1)]

    def steady(self) -> tuple[Sequence[int], Sequence[int]]:
        """Which pieces nobody changes before the next update, and which the next forward pass may change already."""
        steady = set(self._steady)
        return self._steady, [at for at in range(len(self.views)) if at not in steady]


def _view(whole: Tensor, data: int, placed: PlacedPiece) -> Tensor:
    piece: SnapshotPiece = placed.piece
    begin = data + placed.start
    if not piece.nbytes:
        return torch.empty(piece.sizes, dtype=piece.dtype)
    return whole[begin : begin + piece.nbytes].view(piece.dtype).view(piece.sizes)
