"""Small models for parity tests, each with the thing that usually breaks parity, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon

QUIET = echelon.Log(console=False)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class ConvNet(nn.Module):
    """Batch norm: its statistics run over the batch, so replicas must share them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class TiedTransformer(nn.Module):
    """One weight used twice: as embedding and as output layer."""

    def __init__(self, vocab: int = 31, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class SparseEmbedder(nn.Module):
    """Embeddings with sparse gradients beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 6, sparse=True)
        self.bags = nn.EmbeddingBag(40, 6, mode="sum", sparse=True)
        self.head = nn.Linear(12, 4)

    def forward(self, words: Tensor, bags: Tensor) -> Tensor:
        return self.head(torch.cat([self.words(words), self.bags(bags)], 1))


class Partial(nn.Module):
    """A frozen layer, an unused layer, and one that only samples with x[0] > 0 use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(torch.tanh(self.first(x)))
        chosen = x[:, 0] > 0
        if chosen.any():
            h = h + torch.where(chosen[:, None], self.sometimes(x), torch.zeros(()))
        return self.head(h)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_for(model: str, samples: int, step: int) -> tuple[Tensor, ...]:
    """The global batch of one step; every rank can make it and take its part."""
    g = torch.Generator().manual_seed(1000 + step)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (samples, *shape), generator=g)

    if model == "convnet":
        return torch.randn(samples, 3, 8, 8, generator=g) * 2 + 3, ints(5)
    if model == "transformer":
        return ints(31, 7), ints(31, 7)
    if model == "sparse":
        return ints(50), ints(40, 3), ints(4)
    return torch.randn(samples, 6, generator=g), ints(3)


def build(model: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    made: nn.Module = {
        "convnet": ConvNet, "transformer": TiedTransformer, "sparse": SparseEmbedder, "partial": Partial
    }[model]()  # fmt: skip
    return made, token_loss if model == "transformer" else F.cross_entropy
