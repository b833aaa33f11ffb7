"""Models of the planner's benchmarks on CPUs: much to send and little to compute, or the other way round.

No batch norm and no dropout: every way to spread a model over ranks then learns the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data_parallel.slow_links_models import _convolution, _ready
from benchmarks.support.workloads import token_loss

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, and one global batch for it, however many ranks share it."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[int, torch.Generator], Batch]
    rows: int
    lr: float = 0.001

    def start(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model()
        return model, torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def batches(self) -> Iterator[Batch]:
        """Two global batches over and over."""
        draw = torch.Generator().manual_seed(1)
        return itertools.cycle([self.draw(self.rows, draw) for _ in range(2)])

    def sample(self) -> Batch:
        return next(self.batches())


#: optimizer of every Task, as the planner calls it
OPTIMIZER = "momentum"


# ---- much to send: as in VGG, nearly all of the 2.8 M parameters are fully connected ----


def vgg_like() -> nn.Module:
    return _ready(
        *_convolution(1, 16, pool=4),
        nn.Flatten(),
        *(nn.Linear(16 * 49, 1024), nn.ReLU()),
        *(nn.Linear(1024, 1280), nn.ReLU()),
        *(nn.Linear(1280, 512), nn.ReLU()),
        nn.Linear(512, 10),
    )


def _images(rows: int, draw: torch.Generator) -> Batch:
    return torch.randn(rows, 1, 28, 28, generator=draw), torch.randint(10, (rows,), generator=draw)


# ---- much to compute: a transformer whose blocks can be split ----

VOCABULARY, WIDTH, LAYERS, SEQUENCE = 512, 128, 4, 64


class Transformer(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        out: Tensor = self.head(self.layers(h))
        return out


def _tokens(rows: int, draw: torch.Generator) -> Batch:
    ids = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


TASKS = {
    "vgg": Task(vgg_like, F.cross_entropy, _images, rows=64),
    "transformer": Task(Transformer, token_loss, _tokens, rows=16),
}


def row_counts(rows: int, shares: tuple[float, ...], replicas: int) -> list[int]:
    """Return the rows of the global batch of each replica: by its share, whole ones, all of them given out."""
    weights = shares or (1.0,) * replicas
    ends = [round(rows * part / sum(weights)) for part in itertools.accumulate(weights)]
    return [end - first for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def part_of(batch: Batch, counts: list[int], replica: int) -> Batch:
    first = sum(counts[:replica])
    x, y = (tensor[first : first + counts[replica]] for tensor in batch)
    return x, y
