"""Which rows of which parameters each rank holds, and how they lie in a message: one line a rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.distributed.tensor_layout import Layout, Range, shares

ALIGN = 4  # numbers; a shard begins where vector instructions like to


@dataclass(frozen=True)
class RowPartition:
    """One parameter's rows (its slices along ``dim``), shared out over the ranks.

    A parameter without dimensions cannot be cut: every rank holds it, and ``dim`` is ``None``.
    """

    shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[Range, ...]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The rows of ``rank``, as a view."""
        if self.dim is None:
            return whole
        begin, end = self.ranges[rank]
        return whole.narrow(self.dim, begin, end - begin)

    def part_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        begin, end = self.ranges[rank]
        return (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])

    def layout(self, given: Layout, rank: int) -> Layout:
        """What the rows of ``rank`` are a part of, when the parameter itself is the ``given`` part of a whole."""
        return given if self.dim is None else given.cut(self.dim, *self.ranges[rank])


def cut_all(shapes: Mapping[str, tuple[int, ...]], ranks: int, shared: Collection[str] = ()) -> dict[str, RowPartition]:
    """Every parameter's cut. What does not divide goes to those ranks that have the least so far.

    ``shared``: those that other stages have too, beside other parameters; they must be cut alike everywhere.
    """
    load = [0] * ranks
    cuts = {}
    for name, shape in shapes.items():
        cuts[name] = _cut(shape, ranks, first=0 if name in shared else load.index(min(load)))
        for rank in range(ranks):
            load[rank] += math.prod(cuts[name].part_shape(rank))
    return cuts


def _cut(shape: tuple[int, ...], ranks: int, first: int) -> RowPartition:
    if not shape:
        return RowPartition(shape, None, ((0, 1),) * ranks)
    # With too few rows one rank would hold all of a table of positions (1, length, width): then along its length.
    dim = 0 if shape[0] >= ranks else shape.index(max(shape))
    return RowPartition(shape, dim, tuple(shares(shape[dim], ranks, first=first)))


class RowMatrix:
    """The rows of several tensors of one dtype in a matrix with one line a rank: each line holds that rank's."""

    def __init__(self, cuts: Sequence[RowPartition]) -> None:
        self.cuts = cuts
        ranks = len(cuts[0].ranges)
        self._places = [_places(cut.part_shape(rank) for cut in cuts) for rank in range(ranks)]
        self.length = max(_aligned(places[-1][1]) for places in self._places)  #: of a line

    def views(self, line: Tensor, rank: int) -> list[Tensor]:
        """The parts of one rank's line, in the shapes they have as rows of their tensors."""
        return [
            line[begin:end].view(cut.part_shape(rank))
            for cut, (begin, end) in zip(self.cuts, self._places[rank], strict=True)
        ]

    def parts(self, wholes: Iterable[Tensor], rank: int) -> list[Tensor]:
        """The rows of one rank, as views of the whole tensors."""
        return [cut.of(whole, rank) for cut, whole in zip(self.cuts, wholes, strict=True)]

    def read(self, matrix: Tensor, wholes: Sequence[Tensor], but: int | None = None) -> None:
        """Put every line where it belongs in the whole tensors (``but``: not this rank's)."""
        for rank, line in enumerate(matrix):
            if rank != but:
                torch._foreach_copy_(self.parts(wholes, rank), self.views(line, rank))


def _places(shapes: Iterable[tuple[int, ...]]) -> list[Range]:
    places: list[Range] = []
    for shape in shapes:
        begin = _aligned(places[-1][1]) if places else 0
        places.append((begin, begin + math.prod(shape)))
    return places


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
