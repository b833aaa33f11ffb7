"""The models of benchmarks/pipeline/hybrid.py, how each is cut, and the batches it learns from.

All are free of batch norm and dropout, so that every way to spread a model over ranks computes the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.support.workloads import Transformer, token_loss

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One model and its data. ``memory``: bytes that a rank's process may have, where there is a limit."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int, torch.Generator], Batch]  # for so many hosts: the global one
    layers: int = 0
    head: int = 0  # what the head costs, in layers
    micro_batches: int = 8
    memory: int | None = None


def batches(case: Case, world: int) -> Iterator[Batch]:
    """Two global batches over and over, the same for every contender: they are learned, so that losses tell weights."""
    draw = torch.Generator().manual_seed(1)
    return itertools.cycle([case.batch(world, draw) for _ in range(2)])


def share(batch: Batch, rank: int, world: int) -> Batch:
    rows = len(batch[0]) // world
    x, y = (part[rank * rows : (rank + 1) * rows] for part in batch)
    return x, y


# ---- transformers ----


@dataclass(frozen=True)
class Size:
    vocab: int
    width: int
    layers: int
    sequence: int
    rows: int  # of the global batch, however many hosts there are

    def model(self) -> nn.Module:
        return Transformer(self.vocab, self.width, self.layers, self.sequence)

    def tied(self) -> nn.Module:
        model = Transformer(self.vocab, self.width, self.layers, self.sequence)
        nn.init.normal_(model.token.weight, std=0.02)
        model.head.weight = model.token.weight
        return model

    def batch(self, world: int, draw: torch.Generator) -> Batch:
        rows = torch.randint(self.vocab, (self.rows, self.sequence + 1), generator=draw)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def stages(case: Case, count: int) -> list[list[str]]:
    """Modules by stage, equally many layers each; the head counts for as many as it costs."""
    per = (case.layers + case.head) // count
    names = [[f"layers.{at}" for at in range(case.layers)[i * per : (i + 1) * per]] for i in range(count)]
    return [["token", "position", *names[0]], *names[1:-1], [*names[-1], "norm", "head"]]


class Piece(nn.Module):
    """One stage as torch's pipelining wants it: a module of its own."""

    def __init__(self, whole: nn.Module, names: list[str]) -> None:
        super().__init__()
        assert isinstance(whole, Transformer)
        self.token = whole.token if "token" in names else None
        self.position = whole.position if "token" in names else None
        self.layers = nn.Sequential(*(whole.get_submodule(name) for name in names if name.startswith("layers.")))
        self.end = nn.Sequential(whole.norm, whole.head) if "head" in names else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.end(self.layers(x))
        return out


def _language(size: Size, head: int = 0) -> Case:
    return Case(size.model, token_loss, _adamw, size.batch, size.layers, head)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


# ---- classification ----


class Classifier(nn.Module):
    """A small convolutional feature extractor before a head that is nearly all of the model."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(128 * 16, width), nn.LayerNorm(width)),
        )
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


def _classification(classes: int, width: int, rows: int, memory: int | None = None) -> Case:
    def batch(world: int, draw: torch.Generator) -> Batch:
        count = world * rows
        return torch.randn(count, 3, 32, 32, generator=draw), torch.randint(classes, (count,), generator=draw)

    return Case(lambda: Classifier(classes, width), F.cross_entropy, _sgd, batch, memory=memory)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


_BERT = Size(vocab=12288, width=512, layers=6, sequence=32, rows=16)
_MILLION = _classification(1_000_000, 128, rows=8)

CASES: dict[str, Case] = {
    "bert": _language(_BERT, head=2),
    "bert-tied": replace(_language(_BERT, head=2), model=_BERT.tied),
    "bert-tiny": _language(Size(vocab=256, width=64, layers=6, sequence=16, rows=16), head=2),
    "wide": _language(Size(vocab=1024, width=256, layers=8, sequence=128, rows=16)),
    "narrow": _language(Size(vocab=256, width=64, layers=8, sequence=32, rows=16)),
    "classes-1000": _classification(1_000, 64, rows=8),
    "classes-100k": _classification(100_000, 512, rows=16),
    "classes-1m": _MILLION,
    "classes-1m-limited": replace(_MILLION, memory=1_500_000_000),
}
