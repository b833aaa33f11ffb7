"""``JoinedDatasets``: several data sets one after another, which may make whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from echelon.base.errors import DataError
from echelon.data.order import Indices
from echelon.data.seeding import Seeds


class JoinedDatasets(Dataset[Any]):
    """Samples of several data sets, numbered through."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._begins = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        part = self._part(np.array(index)).item()
        return self.parts[part][int(index - self._begins[part])]

    def _part(self, indices: Indices) -> Indices:
        return np.searchsorted(self._begins, indices, side="right") - 1


class JoinedBatches(JoinedDatasets):
    """Joined data sets that make whole batches (``batch(indices, seeds)``), so that these make batches, too."""

    def batch(self, indices: Indices, seeds: Seeds) -> Any:
        parts = self._part(indices)
        cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(indices)]
        made = []
        for begin, end in pairwise(cuts):
            part = int(parts[begin])
            made.append(self.parts[part].batch(indices[begin:end] - self._begins[part], seeds[begin:end]))
        return concatenated(made)


def concatenated(batches: Sequence[Any]) -> Any:
    """Return one batch of the samples of several, in their order."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if hasattr(first, "lengths") and hasattr(first, "bounds"):
        return _repacked(batches)
    if isinstance(first, Mapping):
        return {name: concatenated([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple | list):
        columns = [concatenated(column) for column in zip(*batches, strict=True)]
        return type(first)(columns) if type(first) in (tuple, list) else type(first)(*columns)
    try:
        return torch.cat([torch.as_tensor(batch) for batch in batches])
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"batches of the corpora do not fit together: {error}; let all corpora give "
            "rows of the same length and type"
        ) from None


def _repacked(batches: Sequence[Any]) -> Any:
    from echelon.nn.packed import MULTIPLE, pack_concatenated  # with echelon.nn, which plain rows do not need

    sizes = [batch.lengths.tolist() for batch in batches]
    values = [batch.values[: sum(size)] for batch, size in zip(batches, sizes, strict=True)]
    padding = [batch.values[sum(size) :] for batch, size in zip(batches, sizes, strict=True)]
    fill = [padded[0].item() for padded in padding if len(padded)]
    return pack_concatenated(
        torch.cat(values),
        [*chain.from_iterable(sizes)],
        multiple=MULTIPLE if fill else 1,
        longest=max(batch.longest for batch in batches),
        fill=fill[0] if fill else 0,
    )
