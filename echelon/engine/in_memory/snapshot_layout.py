"""``SnapshotLayout``: the pieces that one rank copies after a step, and their positions in a slot."""

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
    are_copied_here,
    only_here,
    pieces_of,
    place_pieces,
)
from echelon.distributed.tensor_layout import Part
from echelon.engine.in_memory.state_sources import StateSources


class SnapshotLayout:
    """The pieces of the state that this rank copies.

    sent:   bytes at the beginning of a slot that only this host has; they are also sent to the next host
    nbytes: bytes of all pieces
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
        local = are_copied_here([(piece, alike) for piece, _, alike in found], where, rank)
        copied = [each for each, is_ours in zip(found, local, strict=True) if is_ours]
        copied.sort(key=lambda each: not only_here(each[2], where))
        lonely = [piece for piece, _, alike in copied if only_here(alike, where)]
        first, self.sent = place_pieces(lonely)
        rest, self.nbytes = place_pieces([piece for piece, _, _ in copied[len(lonely) :]], self.sent)
        others = [
            PlacedPiece(piece, ELSEWHERE) for (piece, _, _), is_ours in zip(found, local, strict=True) if not is_ours
        ]
        self.placed = [*first, *rest]
        self.table = [*self.placed, *others]
        #: table of the copy on the next host; pieces that are not sent are marked ELSEWHERE
        self.sent_table = [*first, *(PlacedPiece(piece, ELSEWHERE) for piece, _ in rest), *others]
        self.views = [view for _, view, _ in copied]
        self._fresh = {piece.name: at for at, (piece, _, _) in enumerate(copied) if piece.name.startswith("rng.")}
        self._steady = [
            at for at, (piece, _, _) in enumerate(copied) if piece.name.startswith(("model.", "optimizer."))
            and (sources.parameter_of(piece.name) or sources.is_parameter(piece.name.removeprefix("model.")))
        ]  # fmt: skip

    def refresh(self, random: Mapping[str, Tensor]) -> None:
        """Replace the tensors of the RNG state, which are new in every step."""
        for name, value in random.items():
            self.views[self._fresh[name]] = value

    def inside(self, buffer: SnapshotBuffer) -> list[list[Tensor]]:
        """Return the target tensors in the memory of the buffer; the result has one list per slot."""
        whole = torch.frombuffer(buffer.memory, dtype=torch.uint8)
        return [[_view(whole, buffer.data(slot), each) for each in self.placed] for slot in (0, 1)]

    def steady(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return indices of pieces that only an update changes, and of pieces that the next forward pass may change."""
        steady = set(self._steady)
        return self._steady, [at for at in range(len(self.views)) if at not in steady]


def _view(whole: Tensor, data: int, placed: PlacedPiece) -> Tensor:
    piece, begin = placed.piece, data + placed.start
    if not piece.nbytes:
        return torch.empty(piece.sizes, dtype=piece.dtype)
    return whole[begin : begin + piece.nbytes].view(piece.dtype).view(piece.sizes)
