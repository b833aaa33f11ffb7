"""Image data sets that fit in memory as pixels: digits, MNIST, CIFAR."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, TensorDataset

import echelon
from echelon.zoo.entry import Data, Request
from echelon.zoo.preprocessing import ArrayPicture, Recipe, preprocessing_of
from echelon.zoo.preprocessing.pictures import resized, with_channels

Images = NDArray[np.uint8]  #: [n, height, width] or [n, height, width, channels]
Labels = NDArray[np.integer[Any]]

PREPARED_BYTES = 2**29  #: without random transforms, images up to this size in total are preprocessed at the start


class ArrayImages(Dataset[tuple[torch.Tensor, int]]):
    """Images in memory that are cropped, flipped and resized on access."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, recipe: Recipe, size: int) -> None:
        self._pixels, self._labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels
        self._recipe, self._size = recipe, size

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = self._recipe(ArrayPicture(self._pixels[index]), self._size)
        return torch.from_numpy(pixels).permute(2, 0, 1), int(self._labels[index])


def arrays(request: Request, train: tuple[Images, Labels], test: tuple[Images, Labels], about: str) -> Data:
    """Return the data set of these images and labels, with the preprocessing that the request selects."""
    preprocessing = preprocessing_of(request)
    channels = request.get("channels", 3)
    size = request.get("image_size", train[0].shape[1])
    return Data(
        train=_part(*train, preprocessing.train, size, channels),
        test=_part(*test, preprocessing.test, size, channels),
        facts={"num_classes": 1 + int(max(train[1].max(), test[1].max()))},
        arrive=preprocessing.normalize(channels, echelon.device()),
        about=about,
    )


def _part(images: Images, labels: Labels, recipe: Recipe, size: int, channels: int) -> Dataset[Any]:
    stored = torch.from_numpy(np.array(images, order="C"))  # a copy, because the buffer of a file may be read-only
    stored = stored[:, None] if stored.ndim == 3 else stored.permute(0, 3, 1, 2)
    stored, classes = with_channels(stored, channels), torch.from_numpy(labels.astype(np.int64))
    if recipe.is_random or len(stored) * channels * size * size > PREPARED_BYTES:
        return ArrayImages(stored, classes, recipe, size)
    left, upper, right, lower = (round(edge) for edge in recipe.box(stored.shape[3], stored.shape[2]))
    return TensorDataset(resized(stored[:, :, upper:lower, left:right].contiguous(), size), classes)
