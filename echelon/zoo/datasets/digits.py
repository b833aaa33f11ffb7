"""The data set ``digits``: 1,797 real handwritten digits that come with the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from echelon.zoo import registry
from echelon.zoo.datasets.images.arrays import Images, Labels, arrays
from echelon.zoo.entry import Data, Dataset, Request

TRAIN = 1500
BRIGHTEST = 16  #: largest value of a stored pixel


def open_digits(request: Request) -> Data:
    images, labels = stored_digits()
    train, test = (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])
    return arrays(request, train, test, f"{TRAIN:,} handwritten digits of 8 x 8, {len(labels) - TRAIN} to test on")


def stored_digits() -> tuple[Images, Labels]:
    """Return pixels from 0 to 255, and labels, in a fixed random order."""
    path = files("echelon.zoo.datasets") / "bundled" / "digits.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    return np.round(images[order] * (255 / BRIGHTEST)).astype(np.uint8), labels[order]


registry.add(
    Dataset(
        name="digits",
        open=open_digits,
        tasks=("classify_images",),
        about="1,797 handwritten digits that come with the package",
        defaults={"preprocessing_name": "lenet"},  # no flips: a flipped 2 is not a 2
    )
)
