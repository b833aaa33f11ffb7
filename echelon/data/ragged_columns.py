"""``RaggedColumns``: columns of samples in memory, some of which have a different number of entries in each sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from echelon.base.errors import DataError
from echelon.data.order import Indices
from echelon.data.seeding import Seeds

if TYPE_CHECKING:
    from echelon.nn.packed import Packed


class RaggedColumns:
    """A data set of columns, of which a batch has a tensor each, and an ``echelon.nn.Packed`` for a ragged one.

    columns: tensors [n, ...], and for ragged columns pairs of their values, one sample after the other, and offsets
             [n + 1]: sample i has the values from offsets[i] up to offsets[i + 1], which may be none

    ``SparseEmbedding(combiner=...)`` takes a ``Packed`` of ids as one bag a sample.

    >>> tags, offsets = torch.tensor([5, -7, 5]), torch.tensor([0, 2, 2, 3])
    >>> data = echelon.data.RaggedColumns(torch.arange(3), (tags, offsets), torch.zeros(3))
    """

    def __init__(self, *columns: Tensor | tuple[Tensor, Tensor]) -> None:
        if not columns:
            raise DataError("RaggedColumns() needs a column at least")
        self._columns = columns
        lengths = [len(column[1]) - 1 if isinstance(column, tuple) else len(column) for column in columns]
        if len(set(lengths)) > 1:
            raise DataError(f"columns have {lengths} samples; give each as many (a ragged one has an offset more)")
        for values, offsets in (column for column in columns if isinstance(column, tuple)):
            is_rising = bool((offsets[1:] >= offsets[:-1]).all())
            if not is_rising or int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
                found = f"{int(offsets[0])} to {int(offsets[-1])}{'' if is_rising else ', not rising'}"
                raise DataError(f"offsets of a ragged column must rise from 0 to its {len(values)} values, got {found}")
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return tuple(_entry(column, index % self._length) for column in self._columns)

    def batch(self, indices: Indices, seeds: Seeds) -> tuple[Tensor | Packed, ...]:
        at = torch.from_numpy(np.ascontiguousarray(indices))
        return tuple(
            _bags(*column, at) if isinstance(column, tuple) else column.index_select(0, at) for column in self._columns
        )


def _entry(column: Tensor | tuple[Tensor, Tensor], index: int) -> Tensor:
    if not isinstance(column, tuple):
        return column[index]
    values, offsets = column
    return values[int(offsets[index]) : int(offsets[index + 1])]


def _bags(values: Tensor, offsets: Tensor, at: Tensor) -> Packed:
    from echelon.nn.packed import pack_concatenated  # with echelon.nn, which most data sets do not need

    starts, lengths = offsets[at], offsets[at + 1] - offsets[at]
    ends = lengths.cumsum(0)
    shifts = torch.repeat_interleave(starts - (ends - lengths), lengths)
    places = torch.arange(len(shifts)) + shifts
    return pack_concatenated(values[places], lengths.tolist(), multiple=1)
