"""DeepFM on made-up clicks: 26 slots of ids, a factorization machine and a deep network on one sparse table.

    echelon run --servers 2 --workers 2 examples/deepfm.py --mode hybrid
    python examples/deepfm.py

The ids are any int64 numbers; each gets a row when it is first trained. ``admit_after=2`` makes rows only for ids that
were seen twice: most ids of click logs never come again.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.nn import SparseEmbedding
from echelon.strategy.sparse_update_rules import Adagrad

SLOTS, NUMBERS, DIM = 26, 13, 8


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rule = Adagrad(lr=0.05, initial_accumulator=0.1)
        self.first = SparseEmbedding(1, optimizer=rule, initializer=0.0, combiner="sum", admit_after=2)
        self.second = SparseEmbedding(DIM, optimizer=rule, admit_after=2)
        self.numbers = nn.Linear(NUMBERS, 1)
        self.deep = nn.Sequential(nn.Linear(SLOTS * DIM + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        rows = self.second(ids)
        # the sum over all pairs of slots of their rows' products, in linear time
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
        deep = self.deep(torch.cat([rows.flatten(1), numbers], dim=1))
        return (self.first(ids) + self.numbers(numbers) + pairs + deep).squeeze(1)


def clicks(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Few ids are frequent and many are rare, as in a log; each pulls a little to one side."""
    random = np.random.default_rng(seed)
    rank = np.minimum(random.zipf(1.3, (rows, SLOTS)), 50_000)
    ids = (rank * 7919 + np.arange(SLOTS) * 1_000_003) * 2654435761  # spread over all of int64, some below zero
    pull = ((ids >> 7) % 1000) / 1000 - 0.5
    numbers = random.random((rows, NUMBERS), dtype=np.float32)
    chance = 1 / (1 + np.exp(-(pull.sum(1) + numbers.sum(1) - NUMBERS / 2)))
    labels = (random.random(rows) < chance).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(numbers), torch.from_numpy(labels)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--mode", default="hybrid", choices=["collective", "sync", "async", "bounded", "geo", "hybrid"])
    asked = ask.parse_args()
    echelon.init(seed=0)
    model = DeepFM()
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.002),
        strategy=echelon.Strategy(ps=asked.mode),
        log=echelon.Log(console=False),
    )
    before = engine.evaluate(clicks(8_000, seed=2), batch_size=1000)
    for ids, numbers, labels in engine.loader(clicks(60_000, seed=1), global_batch=512):
        engine.step(ids, numbers, labels)
    after = engine.evaluate(clicks(8_000, seed=2), batch_size=1000)
    if echelon.is_first_worker():
        rows = sum(server["rows"]["second"] for server in engine.served.stats())
        print(f"{asked.mode}: loss {before['loss']:.4f} -> {after['loss']:.4f}; {rows:,} rows on the servers")
    engine.close()


if __name__ == "__main__":
    main()
