"""Synthetic images that a model can learn: each class has its own pattern, with noise.

On a GPU the images are in its memory. Gathering a batch there takes almost no time, so a run measures the speed of the
model and not of the input pipeline.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import echelon
from echelon.data import Repeated
from echelon.zoo.entry import Data, Request
from echelon.zoo.preprocessing import preprocessing_of
from echelon.zoo.preprocessing.pictures import resized

SAMPLES = 1024
POOL_BYTES = 2**26  #: bytes of distinct images; if that is not enough, samples share images
FEWEST = 256  #: smallest number of distinct images
GRID = 8  #: a pattern has 8 x 8 cells


def images(request: Request) -> Data:
    """Return images of bytes [n, channels, size, size] and labels; the test has a quarter as many distinct images."""
    channels, size, classes = request.get("channels", 3), request.get("image_size", 224), request["num_classes"]
    samples = request.get("num_sample_per_epoch", SAMPLES)
    pool = min(samples, max(FEWEST, POOL_BYTES // (channels * size * size)))
    tests = max(pool // 4, 1)
    device = echelon.device()
    # every class of the test must occur in training
    labels = torch.arange(pool) % classes if classes <= pool else torch.arange(pool) * classes // pool
    train = _pictures(labels, channels, size, seed=1), labels
    test = _pictures(labels[:tests], channels, size, seed=2), labels[:tests]
    return Data(
        train=Repeated(TensorDataset(*(t.to(device) for t in train)), samples),
        test=TensorDataset(*(t.to(device) for t in test)),
        arrive=preprocessing_of(request).normalize(channels, device),
        about=f"{samples:,} made-up images of {size} x {size} x {channels} in {classes:,} classes"
        + (f" ({pool} different ones)" if pool < samples else ""),
    )


def _pictures(labels: Tensor, channels: int, size: int, seed: int) -> Tensor:
    """Return images of bytes: the pattern of a class depends on its number alone, the noise on ``seed``."""
    noise = torch.Generator().manual_seed(seed)
    patterns = {label: _pattern(label, channels, size) for label in sorted(set(labels.tolist()))}
    made = torch.empty(len(labels), channels, size, size, dtype=torch.uint8)
    for place, label in enumerate(labels.tolist()):
        grain = torch.randint(-40, 41, (channels, size, size), generator=noise, dtype=torch.int16)
        made[place] = (patterns[label].to(torch.int16) + grain).clamp_(0, 255).to(torch.uint8)
    return made


def _pattern(label: int, channels: int, size: int) -> Tensor:
    own = torch.Generator().manual_seed(1000 + label)
    coarse = torch.randint(48, 208, (1, channels, GRID, GRID), generator=own, dtype=torch.uint8)
    return resized(coarse, size)[0]
