"""The two models of benchmarks/data_parallel/slow_links.py and the handwritten digits they learn.

Digits come from MNIST's test part where $ECHELON_TEST_DATA is a folder that holds it, else they are made up: ten
blurred shapes with noise. No model has batch norms: over all replicas or per replica is another comparison.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

IMAGES, LABELS = "mnist-10k-images-idx3-ubyte.gz", "mnist-10k-labels-idx1-ubyte.gz"


@dataclass(frozen=True)
class Work:
    model: Callable[[], nn.Module]
    batch: int  # of one host
    lr: float


def vgg_like() -> nn.Module:
    """A VGG-like model: nearly all of the 10.7 M parameters are fully connected: much to send, little to compute."""
    return _ready(
        *_convolution(1, 8, pool=4),
        nn.Flatten(),
        nn.Linear(8 * 7 * 7, 2560),
        nn.ReLU(),
        nn.Linear(2560, 2560),
        nn.ReLU(),
        nn.Linear(2560, 1216),
        nn.ReLU(),
        nn.Linear(1216, 10),
    )


def convolutions() -> nn.Module:
    """1.0 M parameters, each used at many places of the image: much to compute, little to send."""
    return _ready(
        *_convolution(1, 32, pool=2),
        *_convolution(32, 96, pool=1),
        *_convolution(96, 128, pool=2),
        *_convolution(128, 192, pool=1),
        *_convolution(192, 256, pool=1),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(256 * 9, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def _convolution(inner: int, outer: int, pool: int) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(), nn.MaxPool2d(pool)]


def _ready(*layers: nn.Module) -> nn.Module:
    """He's initialisation: without batch norms, torch's own takes hundreds of steps to start learning."""
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers)


WORKS = {"vgg": Work(vgg_like, batch=16, lr=0.005), "compute": Work(convolutions, batch=32, lr=0.01)}


def batches(work: Work, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of an endless row of global batches, the same row for every contender."""
    images, labels = digits()
    some = images[:1000].float()
    mean, deviation = some.mean(), some.std()
    draw = torch.Generator().manual_seed(1)
    mine = slice(rank * work.batch, (rank + 1) * work.batch)
    while True:
        chosen = torch.randint(len(images), (world * work.batch,), generator=draw)[mine]
        yield (images[chosen].float() - mean) / deviation, labels[chosen]


def digits() -> tuple[Tensor, Tensor]:
    """Images of 28 x 28 bytes, and which digit each shows."""
    folder = os.environ.get("ECHELON_TEST_DATA")
    if folder and (Path(folder) / IMAGES).exists():
        images = _read(Path(folder) / IMAGES, header=16).view(-1, 1, 28, 28)
        return images, _read(Path(folder) / LABELS, header=8).long()
    return _made_up(8192)


def _read(path: Path, header: int) -> Tensor:
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header:]


def _made_up(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    shapes = nn.functional.interpolate(torch.randn(10, 1, 7, 7, generator=draw), 28, mode="bilinear")
    labels = torch.randint(10, (count,), generator=draw)
    noisy = shapes[labels] / 3 + torch.randn(count, 1, 28, 28, generator=draw)
    return (128 + 30 * noisy).clamp(0, 255).byte(), labels
