"""Rows in the format of BERT, [CLS] first text [SEP] second text [SEP], made batch by batch from texts in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.data.order import Indices
from echelon.data.seeding import Seeds
from echelon.data.transfer import each_tensor

Numbers = NDArray[np.int64]


class SpecialTokens(NamedTuple):
    """The numbers of the special tokens of a row."""

    pad: int
    begin: int
    end: int
    mask: int


class TokenBatch(NamedTuple):
    """Rows of tokens, all [n, s]; ``ordinary`` is True for words of a text, not for special tokens or padding."""

    tokens: Numbers
    segments: Numbers
    mask: Numbers
    ordinary: NDArray[np.bool_]


@dataclass(frozen=True)
class TokenRows:
    """Rows of one or two texts.

    tokens: tokens of all texts, one after another
    spans:  [rows, 4]: begin and length of the first text, and of the second (length 0 if there is none)
    length: number of tokens of a row
    signs:  numbers of the special tokens
    """

    tokens: NDArray[np.int32]
    spans: Numbers
    length: int
    signs: SpecialTokens

    def __len__(self) -> int:
        return len(self.spans)

    def used(self) -> Numbers:
        """Return the number of tokens of each row that are not padding."""
        first, second = self.spans[:, 1], self.spans[:, 3]
        return np.where(second > 0, first + second + 3, first + 2)

    def make(self, indices: Indices) -> TokenBatch:
        first, first_length, second, second_length = self.spans[indices].T[:, :, None]
        at = np.arange(self.length)[None]
        second_at = first_length + 2
        used = np.where(second_length > 0, second_at + second_length + 1, second_at)
        in_first = (at >= 1) & (at <= first_length)
        in_second = (at >= second_at) & (at < second_at + second_length)
        ordinary = in_first | in_second
        source = np.where(in_first, first + at - 1, np.where(in_second, second + at - second_at, 0))
        tokens = np.where(ordinary, self.tokens[source].astype(np.int64), self.signs.pad)
        tokens[:, 0] = self.signs.begin
        tokens[(at == first_length + 1) | (at == used - 1)] = self.signs.end
        inside = at < used
        return TokenBatch(tokens, (inside & (at >= second_at)).astype(np.int64), inside.astype(np.int64), ordinary)


class LabelledRows:
    """Rows with a target each; implements ``echelon.data.batched.BatchedDataset``."""

    def __init__(self, rows: TokenRows, targets: NDArray[np.int64]) -> None:
        assert len(rows) == len(targets)
        self.rows, self.targets = rows, targets

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return single(self.batch(np.array([index]), np.zeros(1, np.uint64)))

    def batch(self, indices: Indices, seeds: Seeds) -> tuple[torch.Tensor, ...]:
        made = self.rows.make(indices)
        return (*map(torch.from_numpy, made[:3]), torch.from_numpy(self.targets[indices]))


def single(batch: Any) -> Any:
    """Return the sample of a batch of size 1."""
    return each_tensor(batch, lambda tensor: tensor[0])
