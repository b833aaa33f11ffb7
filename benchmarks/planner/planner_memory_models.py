"""The models of the planner's memory benchmark: a convnet, a transformer and a U-Net, on made-up data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.low_memory.recompute import VOCABULARY, Bert, masked
from benchmarks.support.workloads import ResNet18, Transformer, token_loss


class _Double(nn.Module):
    """Two convolutions, each normalized."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inner, outer, 3, 1, 1), nn.Conv2d(outer, outer, 3, 1, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outer), nn.GroupNorm(4, outer)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """A U-shaped model: units whose outputs are used much later."""

    def __init__(self, width: int = 16, depth: int = 3, channels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = nn.Conv2d(channels, width, 3, 1, 1)
        self.down = nn.ModuleList(_Double(a, a) for a in widths[:-1])
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in itertools.pairwise(widths))
        self.middle = _Double(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(widths[:-1]))
        self.up = nn.ModuleList(_Double(2 * a, a) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.stem(x), []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(down(h))
            h = shrink(kept[-1])
        h = self.middle(h)
        for grow, up in zip(self.grow, self.up, strict=True):
            h = up(torch.cat([grow(h), kept.pop()], 1))
        return self.head(h)


@dataclass(frozen=True)
class Case:
    """A model, its loss, and a batch of so many samples."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int


def _images(side: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, 3, side, side), torch.randint(classes, (samples,)))


def _pixels(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, 3, side, side), torch.randn(samples, 3, side, side))


def _tokens(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def made(samples: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (samples, length))
        return ids, ids.roll(-1, 1)

    return made


class _Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.skip = nn.Sequential()
        if stride != 1 or inner != outer:
            self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.skip(x))


class ResNet50(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*stem)
        blocks, inner = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for at in range(depth):
                blocks.append(_Bottleneck(inner, width, stride if at == 0 else 1))
                inner = 4 * width
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def _masked(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def made(samples: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (samples, length))
        return ids, ids[:, : masked(length)].contiguous()

    return made


CASES: dict[str, Case] = {
    "convnet": Case(lambda: ResNet18(24), F.cross_entropy, _images(32, 10), 32),
    "transformer": Case(lambda: Transformer(4096, 192, 4, 64), token_loss, _tokens(4096, 64), 16),
    "weights": Case(lambda: Transformer(12288, 384, 4, 32), token_loss, _tokens(12288, 32), 4),  # more than activations
    "unet": Case(lambda: UNet(16), F.mse_loss, _pixels(32), 16),
    # of a size for a GPU
    "resnet50": Case(ResNet50, F.cross_entropy, _images(224, 1000), 128),
    "bert-large": Case(Bert, token_loss, _masked(VOCABULARY, 128), 64),
    "gpt": Case(lambda: Transformer(50304, 1024, 24, 1024), token_loss, _tokens(50304, 1024), 8),
}

ON_CPU, ON_GPU = ("convnet", "transformer", "weights", "unet"), ("resnet50", "bert-large", "gpt")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}
