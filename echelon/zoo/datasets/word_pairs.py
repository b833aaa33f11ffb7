"""The data set ``word_pairs``: words with their neighbors from text files and with random words (Mikolov et al. 2013).

The id of a word is a hash of its letters, so ranks need no common vocabulary. The text is stored as one number per
word; pairs are made batch by batch and drawn anew in every epoch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.base.errors import DataError, UsageError
from echelon.data.order import Indices
from echelon.data.seeding import Seeds, chain_each, numpy_stream
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.zoo import registry
from echelon.zoo.datasets.tokens.token_files import find, read_text
from echelon.zoo.entry import Data, Dataset, Request, Setting

TEST_PART = 20  #: the last 1/20 of the words is the test part
FLATTENED = 0.75  #: exponent of the word counts in the distribution of negative samples


class WordCorpus:
    """A text as indices into its distinct words, with the ids and counts of these."""

    def __init__(self, words: Sequence[str], least: int) -> None:
        different, text, counts = np.unique(np.array(words, dtype=object), return_inverse=True, return_counts=True)
        kept = counts >= least
        number = np.cumsum(kept) - 1
        self.text: NDArray[np.int64] = number[text[kept[text]]]
        self.counts: NDArray[np.int64] = counts[kept]
        self.ids: NDArray[np.int64] = np.array([stable_hash(word) for word in different[kept]], np.int64)

    def thinned(self, threshold: float, seed: int) -> NDArray[np.int64]:
        """Return the text with the most frequent words subsampled, because they say little about their neighbors."""
        if not threshold:
            return self.text
        share = self.counts / self.counts.sum()
        chance = np.minimum(1.0, np.sqrt(threshold / share) + threshold / share)
        kept = numpy_stream(seed, len(self.text)).random_sample(len(self.text)) < chance[self.text]
        thinned: NDArray[np.int64] = self.text[kept]
        return thinned


class SkipGramPairs:
    """Skip-gram pairs of a text; implements ``echelon.data.batched.BatchedDataset``.

    A word has on average as many pairs as in the program of the paper, which draws a window size from 1 to ``window``.
    """

    def __init__(self, words: WordCorpus, text: NDArray[np.int64], window: int, negatives: int) -> None:
        self._ids, self._text, self._window, self._negatives = words.ids, text, window, negatives
        flat = np.cumsum(words.counts**FLATTENED)
        self._often = flat / flat[-1]
        far = np.cumsum(np.arange(window, 0, -1))  # distance d has weight window + 1 - d: near ones are more likely
        self._far = far / far[-1]

    def __len__(self) -> int:
        return len(self._text) * (self._window + 1)

    def __getitem__(self, index: int) -> Any:
        made = self.batch(np.array([index]), np.array([random.getrandbits(64)], np.uint64))
        return tuple(column[0] for column in made)

    def batch(self, indices: Indices, seeds: Seeds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draws = chain_each(seeds[:, None], np.arange(2 + self._negatives)[None]) / 2.0**64
        at = np.asarray(indices) // (self._window + 1)
        near = self._neighbour(at, draws[:, 0], draws[:, 1])
        others = np.searchsorted(self._often, draws[:, 2:], side="right").clip(max=len(self._ids) - 1)
        others = np.concatenate([self._text[near][:, None], others], axis=1)
        labels = torch.zeros(others.shape)
        labels[:, 0] = 1
        return torch.from_numpy(self._ids[self._text[at]]), torch.from_numpy(self._ids[others]), labels

    def _neighbour(self, at: Indices, distance: NDArray[np.float64], side: NDArray[np.float64]) -> Indices:
        """Return a position near ``at``, on the other side of it if the first choice is outside the text."""
        step = 1 + np.searchsorted(self._far, distance, side="right").clip(max=self._window - 1)
        step = np.minimum(step, len(self._text) // 2)
        step = np.where(side < 0.5, -step, step)
        outside = (at + step < 0) | (at + step >= len(self._text))
        near: Indices = np.where(outside, at - step, at + step)
        return near


def open_word_pairs(request: Request) -> Data:
    for name, least in (("window", 1), ("min_count", 1), ("subsample", 0)):
        if request[name] < least:
            raise UsageError(f"--{name} {request[name]}: must be {least} or more")
    files = find(request, "*.txt", "text files")
    text = [word for path in files for word in re.findall(r"\w+(?:'\w+)?", read_text(path).lower())]
    words = WordCorpus(text, request["min_count"]) if text else None
    kept = words.thinned(request["subsample"], request["seed"]) if words else np.zeros(0, np.int64)
    if words is None or len(kept) < 2 * TEST_PART:
        raise DataError(
            f"{files[0]} and the like have {len(text)} words, of which {len(kept)} are left by --min_count "
            f"{request['min_count']} and --subsample {request['subsample']}; give more text"
        )
    cut = len(kept) - len(kept) // TEST_PART
    train, test = (
        SkipGramPairs(words, part, request["window"], request.get("negatives", 5)) for part in (kept[:cut], kept[cut:])
    )
    about = f"{len(text):,} words, {len(words.ids):,} different, {len(kept):,} after thinning: {len(train):,} pairs"
    return Data(train=train, test=test, about=f"{about} from {files[0].parent}")


registry.add(
    Dataset(
        name="word_pairs",
        open=open_word_pairs,
        tasks=("word_pairs",),
        about="pairs of neighbouring words from text files",
        settings=(
            Setting(name="window", default=5, meaning="how far apart neighbours may be"),
            Setting(name="min_count", default=5, meaning="rarer words are left out"),
            Setting(name="subsample", default=1e-3, meaning="words more frequent than this part are thinned; 0: none"),
        ),
        defaults={"num_epochs": 3, "stop_at_step": 0},
    )
)
