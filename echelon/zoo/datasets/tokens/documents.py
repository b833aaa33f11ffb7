"""Packed documents for causal language models: positions restart in each document, and attention stays inside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.data.order import Indices
from echelon.data.seeding import Seeds
from echelon.data.tokens.token_store import TokenStore
from echelon.nn.packed import MULTIPLE, Packed, pack_concatenated
from echelon.zoo.datasets.tokens.token_rows import Numbers
from echelon.zoo.tasks import IGNORED


class PackedDocuments:
    """Packed tokens and the tokens that follow them; implements ``echelon.data.batched.BatchedDataset``.

    tokens: all tokens
    begins: first token of each document, and the end of the last one
    length: largest number of tokens per sample; a longer document becomes several samples
    """

    def __init__(
        self, tokens: NDArray[np.integer[Any]] | TokenStore, begins: Numbers, length: int, multiple: int = MULTIPLE
    ) -> None:
        self._tokens, self._length, self._multiple = tokens, length, multiple
        self._begins, self._sizes = _pieces(begins, length)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> Any:
        begin, size = self._begins[index], self._sizes[index]
        whole = torch.from_numpy(self._tokens[np.arange(begin, begin + size + 1)].astype(np.int64))
        return whole[:-1], whole[1:]

    def batch(self, indices: Indices, seeds: Seeds) -> tuple[Packed, Packed]:
        sizes = self._sizes[indices]
        ends = np.cumsum(sizes)
        at = np.repeat(self._begins[indices] - (ends - sizes), sizes) + np.arange(ends[-1])
        return self._row(at, sizes, 0), self._row(at + 1, sizes, IGNORED)

    @property
    def mean_size(self) -> float:
        return float(self._sizes.mean())

    def _row(self, at: NDArray[Any], sizes: NDArray[Any], fill: int) -> Packed:
        values = torch.from_numpy(self._tokens[at].astype(np.int64))
        return pack_concatenated(values, sizes.tolist(), multiple=self._multiple, longest=self._length, fill=fill)


def _pieces(begins: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """Return the begin of each sample, and the number of its tokens that have a next token."""
    known = np.maximum(np.diff(begins) - 1, 0)
    pieces = -(-known // length)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    sizes = np.minimum(length, np.repeat(known, pieces) - number * length)
    return np.repeat(begins[:-1], pieces) + number * length, sizes
