"""Decides which rank copies which piece of the state, and which pieces are replicated to another host.

A piece that several ranks hold is copied once on every host that has it, by one of the ranks there; a piece that only
one host has is replicated to the next host. The ranks tell each other once which parts of the model they hold, and all
decisions follow from that.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import CheckpointError
from echelon.checkpoint.dtypes import refuse_unstorable
from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.distributed.collectives import gather_json
from echelon.distributed.tensor_layout import Part, local_tensor
from echelon.distributed.tensor_region import TensorRegion

_ALIGNED = 64
#: ``start`` of a piece that this rank holds and another rank copies.
ELSEWHERE = -1


class PlacedPiece(NamedTuple):
    """A piece and its offset among the tensors of a slot."""

    piece: TensorRegion
    start: int

    def to_json(self) -> list[Any]:
        return [*self.piece.to_json(), self.start]


def pieces_of(name: str, value: Tensor | Part) -> list[tuple[TensorRegion, Tensor]]:
    """Return the regions of the local tensor, each with a view of its values."""
    tensor = local_tensor(value).detach()
    if type(tensor) is not Tensor:
        raise CheckpointError(f"'{name}' is a {type(tensor).__name__}, which an in-memory snapshot cannot hold")
    refuse_unstorable(name, tensor)
    if isinstance(value, Part) and not value.layout.is_whole:
        return list(value.regions(name))
    shape = tuple(tensor.shape)
    return [(TensorRegion(name, tensor.dtype, shape, (0,) * len(shape), shape), tensor)]


class PieceHolders:
    """The ranks that hold the same tensors as this one, per tensor. All ranks construct it together."""

    def __init__(self, tensors: Mapping[str, Tensor | Part], rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        own = {name: _mark(name, value) for name, value in tensors.items() if name.startswith("model.")}
        everyone = gather_json(sorted(own.values()), group) if group is not None else [list(own.values())]
        ranks: dict[int, list[int]] = {}
        for other, marks in enumerate(everyone):
            for mark in marks:
                ranks.setdefault(mark, []).append(other)
        self._alike = {name: tuple(ranks[mark]) for name, mark in own.items()}
        self._in_parts = {name for name in own if isinstance(tensors[name], Part)}

    def of(self, name: str, value: Tensor | Part, parameter: str | None) -> tuple[int, ...]:
        """Return the ranks that hold the same value; tensors outside the model are held by this rank only.

        parameter:  name of the parameter to which an optimizer state belongs; None for a tensor of the model
        """
        model = name if parameter is None else f"model.{parameter}"
        if model not in self._alike or (model in self._in_parts and not isinstance(value, Part)):
            return (self._rank,)
        return self._alike[model]


def _mark(name: str, value: Tensor | Part) -> int:
    boxes = [(offsets, sizes) for offsets, sizes, _ in value.layout.boxes()] if isinstance(value, Part) else []
    return zlib.crc32(repr((name, tuple(local_tensor(value).shape), boxes)).encode())


def are_copied_here(
    pieces: Sequence[tuple[TensorRegion, tuple[int, ...]]], where: SnapshotHosts, rank: int
) -> list[bool]:
    """Return for every piece, given with its holders, True if this rank copies it on its host.

    Pieces with the same holders are divided among the holders on this host, largest first, each to the least loaded.
    """
    load: dict[tuple[int, ...], dict[int, int]] = {}
    own = [False] * len(pieces)
    for index in sorted(range(len(pieces)), key=lambda i: (-pieces[i][0].nbytes, pieces[i][0].name)):
        piece, holders = pieces[index]
        here = [other for other in holders if where.host_of(other) == where.here]
        loads = load.setdefault(holders, dict.fromkeys(here, 0))
        chosen = min(loads, key=lambda other: (loads[other], other))
        loads[chosen] += piece.nbytes
        own[index] = chosen == rank
    return own


def only_here(holders: Iterable[int], where: SnapshotHosts) -> bool:
    return {where.host_of(rank) for rank in holders} == {where.here}


def place_pieces(pieces: Iterable[TensorRegion], start: int = 0) -> tuple[list[PlacedPiece], int]:
    """Place pieces one after another from ``start``; return them and the end offset."""
    found: list[PlacedPiece] = []
    for piece in pieces:
        found.append(PlacedPiece(piece, start))
        start += -(-piece.nbytes // _ALIGNED) * _ALIGNED
    return found, start
