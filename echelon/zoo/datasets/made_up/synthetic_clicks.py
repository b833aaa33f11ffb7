"""Synthetic tables: clicks, word pairs, features of classes and of values, identical on every rank and in every run.

Train and test have the same distribution, which has a fixed seed, but different samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from echelon.base.errors import UsageError
from echelon.parameter_server.protocol.hashing import stable_hash
from echelon.zoo.entry import Data, Request

LAW, TRAIN, TEST = 7, 1, 2  # seeds


def clicks(request: Request) -> Data:
    """Return synthetic clicks: ids are Zipf-distributed, as in a log, and each id and number shifts the click rate."""
    slots, numbers = request.get("slots", 26), request.get("numbers", 13)
    return _data(request, 40_000, "clicks", lambda rows, seed: _clicks(rows, seed, slots, numbers))


def _clicks(rows: int, seed: int, slots: int, numbers: int) -> list[NDArray[Any]]:
    draw = np.random.RandomState(seed)
    rank = np.minimum(draw.zipf(1.3, (rows, slots)), 50_000)
    ids = (rank * 7919 + np.arange(slots) * 1_000_003) * 2654435761  # spread over the range of int64, also negative
    pull = ((ids >> 7) % 1000) / 1000 - 0.5
    dense = draw.random_sample((rows, numbers)).astype(np.float32)
    score = 2 * pull.sum(1) / np.sqrt(max(slots, 1) / 26) + dense.sum(1) - numbers / 2
    labels = draw.random_sample(rows) < 1 / (1 + np.exp(-score))
    return [ids.astype(np.int64), dense, labels.astype(np.float32)]


def word_pairs(request: Request) -> Data:
    """Return synthetic word pairs: each word belongs to a topic, and neighbors belong to the same topic."""
    negatives = request.get("negatives", 5)
    return _data(request, 40_000, "pairs of words", lambda rows, seed: _pairs(rows, seed, negatives))


def _pairs(rows: int, seed: int, negatives: int, topics: int = 6, words: int = 30) -> list[NDArray[Any]]:
    draw = np.random.RandomState(seed)
    ids = np.array([stable_hash(f"topic{topic}-word{word}") for topic in range(topics) for word in range(words)])
    topic = draw.randint(0, topics, rows)
    word, near = (topic * words + draw.randint(0, words, rows) for _ in range(2))
    far = draw.randint(0, topics * words, (rows, negatives))
    labels = np.zeros((rows, 1 + negatives), np.float32)
    labels[:, 0] = 1
    return [ids[word], ids[np.concatenate([near[:, None], far], axis=1)], labels]


def features(request: Request) -> Data:
    """Return features with one Gaussian cluster per class.

    If there are very many classes, only a part of them occurs, with 8 samples each.
    """
    classes, size = request["num_classes"], request.get("feature_size", 16)
    train_size = request.get("num_sample_per_epoch", 10_000)
    present = np.unique(np.linspace(0, classes - 1, min(classes, max(1, train_size // 8))).astype(np.int64))
    centres = np.random.RandomState(LAW).standard_normal((len(present), size)).astype(np.float32)

    def make(rows: int, seed: int) -> list[NDArray[Any]]:
        draw = np.random.RandomState(seed)
        which = draw.permutation(rows) % len(present)
        noise = draw.standard_normal((rows, size)).astype(np.float32)
        return [centres[which] + np.float32(0.5) * noise, present[which]]

    return _data(request, 10_000, f"examples of {len(present):,} of {classes:,} classes", make)


def values(request: Request) -> Data:
    """Return features and values that are linear in the features, with a little noise."""
    size, outputs = request.get("feature_size", 16), request.get("outputs", 1)
    weights = np.random.RandomState(LAW).standard_normal((size, outputs))

    def make(rows: int, seed: int) -> list[NDArray[Any]]:
        draw = np.random.RandomState(seed)
        x = draw.standard_normal((rows, size))
        y = x @ weights + 1.0 + 0.1 * draw.standard_normal((rows, outputs))
        return [x.astype(np.float32), y.astype(np.float32)]

    return _data(request, 10_000, "examples", make)


def _data(request: Request, default: int, what: str, make: Callable[[int, int], list[NDArray[Any]]]) -> Data:
    """Return the data set of the columns that ``make`` returns for a number of rows and a seed.

    The test part has a fifth as many rows as the training part.
    """
    size = request.get("num_sample_per_epoch", default)
    if size < 1:
        raise UsageError(f"--num_sample_per_epoch {size}: must be 1 or more")
    train, test = (
        TensorDataset(*map(torch.from_numpy, make(rows, seed)))
        for rows, seed in ((size, TRAIN), (max(1, size // 5), TEST))
    )
    return Data(train=train, test=test, about=f"{size:,} made-up {what}")
