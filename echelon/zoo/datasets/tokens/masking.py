"""Masking of words for BERT (Devlin et al. 2019).

15 % of the words of a row are predicted: 80 % of these are replaced by [MASK], 10 % by another word, and 10 % stay. The
choice is drawn anew in every epoch, from the seed of the sample.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.data.order import Indices
from echelon.data.seeding import Seeds, chain_each
from echelon.zoo.datasets.tokens.token_rows import Numbers, TokenBatch, TokenRows, single
from echelon.zoo.tasks import IGNORED

ASKED, HIDDEN, CHANGED = 0.15, 0.8, 0.1


class MaskedTokens(NamedTuple):
    """A masked batch.

    tokens:    [n, s], the input of the model
    positions: [n, p], sorted positions of masked words; padded with 0
    labels:    [n, p], original words at these positions; padded with ``IGNORED``
    """

    tokens: Numbers
    positions: Numbers
    labels: Numbers


def mask_words(made: TokenBatch, seeds: Seeds, *, most: int, mask: int, others: Numbers) -> MaskedTokens:
    """Mask words of a batch.

    most:   number of positions per row (p)
    mask:   number of [MASK]
    others: numbers of words that may replace a word
    """
    rows, length = made.tokens.shape
    draws = chain_each(seeds[:, None], np.arange(length + 2 * most)[None])
    positions, is_label = _choose(draws[:, :length], made.ordinary, most)
    labels = np.take_along_axis(made.tokens, positions, 1)
    fate = draws[:, length : length + most] / 2.0**64
    others = others[draws[:, length + most :] % np.uint64(len(others))]
    shown = np.where(fate < HIDDEN, mask, np.where(fate < HIDDEN + CHANGED, others, labels))
    tokens = made.tokens.copy()
    row = np.broadcast_to(np.arange(rows)[:, None], is_label.shape)
    tokens[row[is_label], positions[is_label]] = shown[is_label]
    return MaskedTokens(tokens, positions, np.where(is_label, labels, IGNORED))


def _choose(draws: Seeds, ordinary: NDArray[np.bool_], most: int) -> tuple[Numbers, NDArray[np.bool_]]:
    """Choose the words with the smallest draws; return their sorted positions [n, most] and the mask of valid ones."""
    rows, length = ordinary.shape
    words = ordinary.sum(1)
    wanted = np.clip(np.floor(words * ASKED + 0.5).astype(np.int64), np.minimum(words, 1), min(most, length))
    places = np.full((rows, most), length)
    nearest = np.argsort(np.where(ordinary, draws, np.uint64(2**64 - 1)), axis=1)[:, :most]
    places[:, : nearest.shape[1]] = nearest
    is_label = np.arange(most)[None] < wanted[:, None]
    places = np.sort(np.where(is_label, places, length), axis=1)  # invalid positions are last
    return np.where(is_label, places, 0), is_label


class MaskedRows:
    """Rows for BERT's two tasks; implements ``echelon.data.batched.BatchedDataset``."""

    def __init__(self, rows: TokenRows, follows: Numbers, *, most: int, others: Numbers) -> None:
        self.rows, self.follows, self._most, self._others = rows, follows, most, others

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return single(self.batch(np.array([index]), np.array([random.getrandbits(64)], np.uint64)))

    def batch(self, indices: Indices, seeds: Seeds) -> tuple[Any, ...]:
        made = self.rows.make(indices)
        masked = mask_words(made, seeds, most=self._most, mask=self.rows.signs.mask, others=self._others)
        inputs = (masked.tokens, made.segments, made.mask, masked.positions)
        target = (torch.from_numpy(masked.labels), torch.from_numpy(self.follows[indices]))
        return (*map(torch.from_numpy, inputs), target)
