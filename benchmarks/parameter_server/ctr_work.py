"""Work C of the comparison: 26 slots of a million zipf(1.1) ids each, dim 16, 13 numbers, an MLP 256-128-1.

Every contender trains on these batches: worker w's batch i is the same for all who keep workers' data apart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

BATCH, SLOTS, VOCABULARY, DIM, NUMBERS, RATE = 512, 26, 1_000_000, 16, 13, 0.05
#: batches before a worker's data begins anew
BATCHES = 200

Arrays = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]


def batches(worker: int, count: int = BATCHES) -> Arrays:
    """ids [count, batch, slots] with slot s in [s, s + 1) * VOCABULARY, numbers [count, batch, 13], labels."""
    weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -1.1
    cumulated = np.cumsum(weights)
    cumulated /= cumulated[-1]
    draw, slot = np.random.default_rng(300 + worker), np.arange(SLOTS)
    ranks = np.searchsorted(cumulated, draw.random((count, BATCH, SLOTS))).clip(0, VOCABULARY - 1)
    ids = (ranks.astype(np.int64) * 7919 + slot * 104729) % VOCABULARY + slot * VOCABULARY
    numbers = draw.random((count, BATCH, NUMBERS), dtype=np.float32)
    hidden = ((ids * np.int64(2654435761)) & 0xFFFFFF) / float(0x1000000) - 0.5
    logit = 1.2 * hidden.sum(-1) + (numbers.sum(-1) - 6.5) * 0.3 - 0.5
    labels = (draw.random((count, BATCH)) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return ids, numbers, labels


def dealt(workers: int, *, same: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """All workers' batches in one order, which a loader without shuffling deals out again as they were.

    ``same``: every worker has worker 0's.
    """
    each = [batches(0)] * workers if same else [batches(worker) for worker in range(workers)]
    joined = [np.stack(parts, 1) for parts in zip(*each, strict=True)]  # [count, workers, batch, ...]
    ids, numbers, labels = (torch.from_numpy(a.reshape(-1, *a.shape[3:])) for a in joined)
    return ids, numbers, labels


def write_criteo(path: Path, workers: int) -> None:
    """The same rows as a file, worker after worker, so that each reads its own; an id is written as a word."""
    with path.open("w") as file:
        for worker in range(workers):
            ids, numbers, labels = batches(worker)
            rows = zip(labels.reshape(-1), numbers.reshape(-1, NUMBERS), ids.reshape(-1, SLOTS), strict=True)
            for label, counts, words in rows:
                values = [f"{count:.4f}" for count in counts.tolist()] + [f"{word:08x}" for word in words.tolist()]
                file.write(f"{label:.0f}\t" + "\t".join(values) + "\n")


class Dense(nn.Module):
    """The network over embeddings [rows, slots * dim] and numbers [rows, 13]."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(SLOTS * DIM + NUMBERS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        self.wide = nn.Linear(NUMBERS, 1)

    def forward(self, embedded: Tensor, numbers: Tensor) -> Tensor:
        logit: Tensor = self.deep(torch.cat([embedded, numbers], 1)) + self.wide(numbers)
        return logit.squeeze(1)
