"""``Layout``: the position of a local tensor in a whole parameter.

Parameters are plain local tensors; their layout is kept beside them. So optimizers, autograd and every torch operation
see ordinary tensors, shards may have any width, and checkpoints know the position of each piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.distributed.tensor_region import TensorRegion, narrow

Range = tuple[int, int]  # begin, end (exclusive)
Box = tuple[
    tuple[int, ...], tuple[int, ...], tuple[int, ...]
]  # offsets in the whole, sizes, offsets in the local tensor


@dataclass(frozen=True)
class Layout:
    """The ``shape`` of the whole, and for each cut dimension the ranges of the local tensor, in order."""

    shape: tuple[int, ...]
    parts: Mapping[int, tuple[Range, ...]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(end - begin for begin, end in self._ranges(dim)) for dim in range(len(self.shape)))

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of this part of ``whole``."""
        for dim, ranges in self.parts.items():
            whole = torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in ranges], dim)
        return whole if self.parts else whole.clone(memory_format=torch.preserve_format)  # cat has copied it already

    def cut(self, dim: int, first: int, end: int) -> Layout:
        """Return the layout of ``first`` to ``end`` (exclusive) along ``dim`` of the local tensor."""
        kept: list[Range] = []
        at = 0
        for begin, stop in self._ranges(dim):
            low, high = max(first - at, 0), min(end - at, stop - begin)
            if low < high:
                kept.append((begin + low, begin + high))
            at += stop - begin
        return Layout(self.shape, {**self.parts, dim: tuple(kept) or ((0, 0),)})

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the local tensor; none if it is empty."""
        along = [list(self._placed(dim)) for dim in range(len(self.shape))]
        for chosen in itertools.product(*along):
            offsets, sizes, starts = zip(*chosen, strict=True) if chosen else ((), (), ())
            if math.prod(sizes):
                yield offsets, sizes, starts

    def _ranges(self, dim: int) -> tuple[Range, ...]:
        return self.parts.get(dim, ((0, self.shape[dim]),))

    def _placed(self, dim: int) -> Iterator[tuple[int, int, int]]:
        at = 0
        for begin, end in self._ranges(dim):
            yield begin, end - begin, at
            at += end - begin


class Part(NamedTuple):
    """A local tensor together with its layout."""

    tensor: Tensor
    layout: Layout

    def regions(self, name: str) -> Iterator[tuple[TensorRegion, Tensor]]:
        """Yield the regions of the whole that the local tensor holds, each with a view of its values."""
        local = self.tensor.detach()
        for offsets, sizes, starts in self.layout.boxes():
            yield TensorRegion(name, local.dtype, self.layout.shape, offsets, sizes), narrow(local, starts, sizes)


def local_tensor(value: Tensor | Part) -> Tensor:
    return value.tensor if isinstance(value, Part) else value


def shares(total: int, parts: int, weights: tuple[float, ...] | None = None, first: int = 0) -> list[Range]:
    """Divide ``total`` into ``parts`` consecutive ranges, as even as possible, or in proportion to ``weights``.

    The remainder goes to the parts from ``first`` on, so that the remainders of many tensors even out.
    """
    if weights is None:
        size, rest = divmod(total, parts)
        sizes = [size + ((i - first) % parts < rest) for i in range(parts)]
    else:
        bounds = [round(total * sum(weights[:i]) / sum(weights)) for i in range(parts + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
