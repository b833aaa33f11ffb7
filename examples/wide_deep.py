"""Wide & Deep on census data (or data made up like it): which people earn more than 50,000 dollars a year?

    echelon run --servers 1 --workers 2 examples/wide_deep.py --mode sync
    python examples/wide_deep.py

Words become int64 ids by hashing; there is no vocabulary. The wide part gives every id one weight, trained by FTRL; the
deep part gives it a vector. Both live in sparse tables: on servers, or in this process when there are none.
ADULT names a directory with adult-train.csv.gz and adult-test.csv.gz (UCI Adult); without it, rows are made up.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.data import CtrFiles, Loader
from echelon.nn import SparseEmbedding
from echelon.strategy.sparse_update_rules import Adagrad, Ftrl

COLUMNS = [
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "label"),
]
NUMBERS = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
WORDS = ["workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country"]


class WideDeep(nn.Module):
    def __init__(self, dim: int = 8, dtype: str = "float32") -> None:
        super().__init__()
        self.wide = SparseEmbedding(1, optimizer=Ftrl(lr=0.1), initializer=0.0, combiner="sum", dtype=dtype)
        self.deep = SparseEmbedding(dim, optimizer=Adagrad(lr=0.05), dtype=dtype)
        self.net = nn.Sequential(
            nn.Linear(len(NUMBERS) + len(WORDS) * dim, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        deep = self.net(torch.cat([self.deep(ids).flatten(1), numbers], dim=1))
        return (deep + self.wide(ids)).squeeze(1)


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a positive is ranked above a negative."""
    ranks = torch.empty(len(scores), dtype=torch.double)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.double)
    positive = labels > 0.5
    ones, zeros = positive.sum().item(), (~positive).sum().item()
    return (ranks[positive].sum().item() - ones * (ones + 1) / 2) / (ones * zeros)


def people(kind: str) -> CtrFiles:
    real = Path(os.environ.get("ADULT", "missing")) / f"adult-{kind}.csv.gz"
    return CtrFiles(
        str(real if real.exists() else made_up(kind)),
        format="csv",
        names=COLUMNS,
        positive=(">50K", ">50K."),
        numeric=NUMBERS,
        categorical=WORDS,
    )


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--mode", default="sync", choices=["collective", "sync", "async", "bounded", "geo", "hybrid"])
    ask.add_argument("--dtype", default="float32", choices=["float32", "bf16", "int8"])
    ask.add_argument("--epochs", type=int, default=3)
    ask.add_argument("--seed", type=int, default=0)
    asked = ask.parse_args()

    echelon.init(seed=asked.seed)
    model = WideDeep(dtype=asked.dtype)
    engine = echelon.distribute(
        model,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.002),
        strategy=echelon.Strategy(ps=asked.mode),
        log=echelon.Log(console=False),
    )
    loader = engine.loader(people("train"), global_batch=512)
    for _ in loader.epochs(asked.epochs):
        for ids, numbers, labels in loader:
            engine.step(ids, numbers, labels)

    engine.synchronize()
    model.eval()
    with torch.no_grad():
        judged = [(model(ids, numbers), labels) for ids, numbers, labels in Loader(people("test"), batch_size=4096)]
    scores, labels = (torch.cat(parts) for parts in zip(*judged, strict=True))
    if echelon.is_first_worker():
        print(f"{asked.mode}: AUC {auc(scores, labels):.5f} on {len(labels):,} people")
    engine.close()


def made_up(kind: str) -> Path:
    """Rows in the form of the census data, with a pattern to be found."""
    path = Path(tempfile.gettempdir()) / f"echelon-people-{kind}-{os.getpid()}.csv"
    random = np.random.default_rng(len(kind))
    rows = 12000 if kind == "train" else 4000
    words = random.integers(0, 12, (rows, len(WORDS)))
    numbers = random.random((rows, len(NUMBERS))) * 10
    hidden = np.random.default_rng(7).normal(size=(len(WORDS), 12))
    score = hidden[np.arange(len(WORDS)), words].sum(1) + np.log1p(numbers) @ np.linspace(-1, 1, len(NUMBERS))
    rich = score + random.normal(size=rows) > 1.0
    lines = []
    for own, word, number in zip(rich, words, numbers, strict=True):
        row = dict(zip(NUMBERS, (f"{n:.3f}" for n in number), strict=True)) | dict(
            zip(WORDS, (f"w{w}" for w in word), strict=True)
        )
        lines.append(",".join([*(row.get(column, "0") for column in COLUMNS[:-1]), ">50K" if own else "<=50K"]))
    path.write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    main()
