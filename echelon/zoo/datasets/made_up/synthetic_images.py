"""Made-up images that a model can learn: each class has a pattern of its own, under noise.

On a GPU they lie in its memory. A batch is then gathered there in no time, so that a run shows the speed of the model
and not that of the input.
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
POOL_BYTES = 2**26  #: larger images are shared by several samples, but there are 256 different ones at least
FEWEST = 256
GRID = 8  #: a pattern's details are an eighth of the image


def images(request: Request) -> Data:
    """Bytes [n, channels, size, size] and labels; a quarter as many for the test."""
    channels, size, classes = request.get("channels", 3), request.get("image_size", 224), request["num_classes"]
    samples = request.get("num_sample_per_epoch", SAMPLES)
    pool = min(samples, max(FEWEST, POOL_BYTES // (channels * size * size)))
    tests = max(pool // 4, 1)
    device = echelon.device()
    # every class of the test must be one that training has shown
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
    """A class's pattern is drawn from its number alone, the noise from ``seed``; bytes."""
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
