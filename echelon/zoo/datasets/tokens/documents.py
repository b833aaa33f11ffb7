"""Packed documents for causal language models: positions restart in each document, and attention stays inside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.data.order import Indices
from echelon.data.seeding import Seeds
from echelon.nn.packed import MULTIPLE, Packed, pack_concatenated
from echelon.zoo.datasets.tokens.token_rows import Numbers
from echelon.zoo.datasets.tokens.vocabulary import TokenizedTexts
from echelon.zoo.tasks import IGNORED


class PackedDocuments:
    """Packed tokens and the tokens that follow them; implements ``echelon.data.batched.BatchedDataset``.

    length: largest number of tokens per sample; a longer document becomes several samples
    """

    def __init__(self, texts: TokenizedTexts, length: int, multiple: int = MULTIPLE) -> None:
        self._tokens, self._length, self._multiple = texts.tokens, length, multiple
        self._begins, self._sizes = _pieces(texts, length)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> Any:
        begin, size = self._begins[index], self._sizes[index]
        whole = torch.from_numpy(self._tokens[begin : begin + size + 1].astype(np.int64))
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


def _pieces(texts: TokenizedTexts, length: int) -> tuple[Numbers, Numbers]:
    """Return the begin of each sample, and the number of its tokens that have a next token."""
    begins, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for begin, stop in zip(texts.begins[:-1].tolist(), texts.begins[1:].tolist(), strict=True):
        at = np.arange(begin, stop - 1, length, dtype=np.int64)
        begins.append(at)
        sizes.append(np.minimum(length, stop - 1 - at))
    return np.concatenate(begins), np.concatenate(sizes)
