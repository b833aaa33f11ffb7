"""``TensorRegion``: a rectangular region of a named tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorRegion(NamedTuple):
    """A region of the tensor ``name`` of a whole ``shape``: from ``offsets`` on, ``sizes`` along its dimensions."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def intersection(self, other: TensorRegion) -> TensorRegion | None:
        """Return the common region of two regions of one tensor; None if it is empty. Scalars always intersect."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self[3:], *other[3:], strict=True))
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return self._replace(offsets=begins, sizes=sizes) if all(size > 0 for size in sizes) else None

    def view_of(self, tensor: Tensor, origin: Sequence[int] | None = None) -> Tensor:
        """Return the view of this region in ``tensor``: the whole, or a part of it that begins at ``origin``."""
        begins = self.offsets if origin is None else [at - zero for at, zero in zip(self.offsets, origin, strict=True)]
        return narrow(tensor, begins, self.sizes)

    def to_json(self) -> list[Any]:
        return [self.name, str(self.dtype).removeprefix("torch."), *self[2:]]

    @staticmethod
    def from_json(plain: Sequence[Any]) -> TensorRegion:
        name, word, *numbers = plain
        dtype = getattr(torch, word, None)
        if not isinstance(dtype, torch.dtype):  # it came from another process
            raise ValueError(f"'{word}' is no dtype")
        return TensorRegion(name, dtype, *map(tuple, numbers))


def narrow(tensor: Tensor, begins: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of ``tensor``: from ``begins`` on, ``sizes`` along its dimensions."""
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
