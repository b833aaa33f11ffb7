"""Data sets of image files: each image is read, decoded, cropped and resized on access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

import echelon
from echelon.zoo.datasets.images.image_cache import CachedImageStore
from echelon.zoo.entry import Data, Request
from echelon.zoo.preprocessing import EncodedPicture, Recipe, preprocessing_of

Numbers = NDArray[np.int64]


class ImageStore(Protocol):
    """Image files by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str:
        """Return the name of an image for error messages."""

    def sizes(self) -> Numbers:
        """Return the sizes of all images in bytes."""


@dataclass(frozen=True, kw_only=True)
class ImageCatalogue:
    """Images, their labels, and the indices of those for training and for tests."""

    store: ImageStore
    labels: Numbers
    train: Numbers
    test: Numbers
    classes: int
    about: str


class EncodedImages(Dataset[tuple[torch.Tensor, int]]):
    """A data set of chosen images of a store."""

    def __init__(
        self, store: ImageStore, labels: Numbers, chosen: Numbers, recipe: Recipe, size: int, channels: int
    ) -> None:
        self._store, self._labels, self._chosen = store, labels, chosen
        self._recipe, self._size, self._channels = recipe, size, channels

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        at = int(self._chosen[index])
        picture = EncodedPicture(self._store.read(at), self._channels, self._store.name(at))
        pixels = self._recipe(picture, self._size)
        return torch.from_numpy(pixels).permute(2, 0, 1), int(self._labels[at])


def encoded(request: Request, found: ImageCatalogue) -> Data:
    """Return the data set of these images, with the preprocessing that the model and the input parameters select."""
    preprocessing = preprocessing_of(request)
    channels, size = request.get("channels", 3), request.get("image_size", 224)
    store = CachedImageStore(found.store) if request.get("datasets_use_caching", False) else found.store

    def part(chosen: Numbers, recipe: Recipe) -> EncodedImages:
        return EncodedImages(store, found.labels, chosen, recipe, size, channels)

    return Data(
        train=part(found.train, preprocessing.train),
        test=part(found.test, preprocessing.test) if len(found.test) else None,
        facts={"num_classes": found.classes},
        loader={"collate": channels_last},
        arrive=preprocessing.normalize(channels, echelon.device()),
        about=found.about,
    )


def every_tenth(labels: Numbers) -> NDArray[np.bool_]:
    """Return the mask of the default test part: every tenth image of each class, beginning with its tenth."""
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], labels[order])
    chosen = np.empty(len(labels), dtype=np.bool_)
    chosen[order] = (np.arange(len(labels)) - starts) % 10 == 9
    return chosen


def channels_last(samples: list[tuple[torch.Tensor, int]]) -> list[Any]:
    """Collate a batch in the channels_last memory format.

    Decoded pixels already have this order, so it is a plain copy, and convolutions on GPUs are fastest with it.
    """
    images, labels = default_collate([(image.permute(1, 2, 0), label) for image, label in samples])
    return [images.permute(0, 3, 1, 2), labels]
