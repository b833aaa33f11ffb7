"""Partition of parameters into rows per rank, and the layout of these rows in a message with one line per rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.distributed.tensor_layout import Layout, Range, shares

ALIGN = 4  # in numbers; aligns the beginning of a shard for vector instructions


@dataclass(frozen=True)
class RowPartition:
    """Partition of one parameter's rows (its slices along ``dim``) over the ranks.

    A parameter without dimensions cannot be partitioned: every rank holds it, and ``dim`` is ``None``.
    """

    shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[Range, ...]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """Return the rows of ``rank`` as a view."""
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
        """Return the layout of the rows of ``rank``, where ``given`` is the layout of the parameter itself."""
        return given if self.dim is None else given.cut(self.dim, *self.ranges[rank])


def cut_all(shapes: Mapping[str, tuple[int, ...]], ranks: int, shared: Collection[str] = ()) -> dict[str, RowPartition]:
    """Return the partition of every parameter; remainder rows go to the ranks that hold the least so far.

    shared: names of parameters that other stages hold too; they are partitioned in the same way on every stage
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
    # A position table (1, length, width) has too few rows, and one rank would hold all of it: cut the longest dim.
    dim = 0 if shape[0] >= ranks else shape.index(max(shape))
    return RowPartition(shape, dim, tuple(shares(shape[dim], ranks, first=first)))


class RowMatrix:
    """Layout of the rows of several tensors of one dtype in a matrix, whose line r holds the rows of rank r."""

    def __init__(self, cuts: Sequence[RowPartition]) -> None:
        self.cuts = cuts
        ranks = len(cuts[0].ranges)
        self._places = [_places(cut.part_shape(rank) for cut in cuts) for rank in range(ranks)]
        self.length = max(_aligned(places[-1][1]) for places in self._places)  #: length of a line

    def views(self, line: Tensor, rank: int) -> list[Tensor]:
        """Return views of one rank's line, one per tensor, in the shapes of the rank's rows."""
        return [
            line[begin:end].view(cut.part_shape(rank))
            for cut, (begin, end) in zip(self.cuts, self._places[rank], strict=True)
        ]

    def parts(self, wholes: Iterable[Tensor], rank: int) -> list[Tensor]:
        """Return the rows of one rank as views of the whole tensors."""
        return [cut.of(whole, rank) for cut, whole in zip(self.cuts, wholes, strict=True)]

    def read(self, matrix: Tensor, wholes: Sequence[Tensor], but: int | None = None) -> None:
        """Copy every line into its rows of the whole tensors, except the line of rank ``but``."""
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
