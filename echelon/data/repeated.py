"""Makes a data set longer or shorter: an epoch has a given number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from echelon.base.errors import DataError
from echelon.data.order import Indices


class Repeated(Dataset[Any]):
    """A number of samples of a map-style data set or of tensors: all samples repeatedly, or evenly spaced ones.

    dataset: data set or tuple of tensors
    size:    number of samples. A part is evenly spaced because data sets are often sorted by class

    >>> longer = echelon.data.Repeated(dataset, 1000)
    """

    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset, self._size = dataset, _at_least_one(size)
        self._rows = len(dataset[0]) if isinstance(dataset, tuple) else len(dataset)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        row = int(self.rows(np.array(index)))
        return tuple(column[row] for column in self.dataset) if isinstance(self.dataset, tuple) else self.dataset[row]

    def rows(self, indices: Indices) -> Indices:
        """Return the rows of the data set for these samples."""
        if self._size <= self._rows:
            return indices * self._rows // self._size
        return indices % self._rows


class RepeatedStream(IterableDataset[Any]):
    """The first samples of a stream, which restarts if it has fewer.

    dataset: iterable of samples
    size:    number of samples

    >>> first = echelon.data.RepeatedStream(iter_samples, 1000)
    """

    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset, self._size = dataset, _at_least_one(size)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        left = self._size
        while left:
            before = left
            for sample in islice(self.dataset, left):
                left -= 1
                yield sample
            if left == before:
                raise DataError("the data set is empty; check its path or filter")


def _at_least_one(size: int) -> int:
    if size < 1:
        raise DataError(f"an epoch of {size} samples: expected 1 or more")
    return size
