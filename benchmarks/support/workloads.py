"""The two workloads of the data-parallel benchmark: a ResNet-18 layout and a 4-layer transformer, on made-up data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.skip = nn.Sequential()
        if stride != 1 or inner != outer:
            self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet18(nn.Module):
    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inner = [], width
        for outer, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [Block(inner, outer, stride), Block(outer, outer, 1)]
            inner = outer
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocab: int = 8192, width: int = 256, layers: int = 4, sequence: int = 128) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(sequence, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(h)))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Workload:
    name: str
    batch: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int], list[tuple[Tensor, Tensor]]]


def _images(rank: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(32, 3, 32, 32, generator=g), torch.randint(10, (32,), generator=g)) for _ in range(8)]


def _tokens(rank: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(200 + rank)
    rows = [torch.randint(8192, (8, 129), generator=g) for _ in range(8)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


WORKLOADS = {
    "resnet18": Workload("resnet18", 32, ResNet18, _sgd, F.cross_entropy, _images),
    "transformer": Workload("transformer", 8, Transformer, _adamw, token_loss, _tokens),
}
