"""Preprocessing by name: the crops and augmentations in training and in tests, and the normalization.

    lenet       the whole image; -1 to 1
    cifarnet    padded by an eighth on every side and cropped again, flipped; CIFAR-10's mean and deviation
    vgg         a square at a random scale, flipped; ImageNet's mean and deviation
    inception   5 to 100 % of the area, flipped, brightness, contrast and saturation changed; -1 to 1
    resnet      8 to 100 % of the area, flipped; ImageNet's mean and deviation
    none        the whole image; 0 to 1

Tests use a center crop or the whole image, with the same normalization.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from echelon.base.errors import UsageError, nearest
from echelon.zoo.entry import Request
from echelon.zoo.preprocessing.boxes import Box, center, random_area, random_scale, whole
from echelon.zoo.preprocessing.normalize import Normalize
from echelon.zoo.preprocessing.pictures import Picture, Pixels

BRIGHTNESS = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # luma weights of red, green, blue (ITU-R 601)

SMALL = 96  #: image size in pixels below which a crop of a small part of the area has too little content


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The transform of one image. It draws from ``random`` in this order: box, padding, flip, colors.

    box:    function of width and height that returns the crop box
    pad:    width of the black border, as a fraction of the size; a random crop of the size follows
    flip:   True mirrors half of the images, at random
    colour: largest relative change of each of brightness, contrast and saturation
    """

    box: Callable[[int, int], Box] = whole
    pad: float = 0.0
    flip: bool = False
    colour: float = 0.0

    @property
    def is_random(self) -> bool:
        return self.pad > 0 or self.flip or self.colour > 0

    def __call__(self, picture: Picture, size: int) -> Pixels:
        pixels = picture.part(self.box(picture.width, picture.height), size)
        if self.pad:
            pixels = padded_crop(pixels, round(self.pad * size))
        if self.flip and random.random() < 0.5:
            pixels = torch.from_numpy(pixels).flip(1).numpy()  # 15 times as fast as numpy
        if self.colour:
            factors = [random.uniform(1 - self.colour, 1 + self.colour) for _ in range(3)]
            pixels = coloured(pixels, *factors)
        return np.ascontiguousarray(pixels)


def padded_crop(pixels: Pixels, pad: int) -> Pixels:
    size = len(pixels)
    upper, left = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
    return np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))[upper : upper + size, left : left + size]


def coloured(pixels: Pixels, brightness: float, contrast: float, saturation: float) -> Pixels:
    """Return pixels with changed brightness, contrast and saturation; a factor of 1 is no change.

    The three changes together are one linear map of a pixel's colors and one shift.
    """
    channels = pixels.shape[2]
    weights = BRIGHTNESS if channels == 3 else np.ones(1, dtype=np.float32)
    flat = pixels.reshape(-1, channels).astype(np.float32)
    mean = np.full(len(flat), 1 / len(flat), dtype=np.float32) @ flat @ weights  # a tenth of the time of mean()
    mixing = saturation * np.eye(channels, dtype=np.float32) + (1 - saturation) * weights[:, None]
    flat = flat @ (brightness * contrast * mixing).astype(np.float32)
    flat += np.float32((1 - contrast) * brightness * mean + 0.5)  # plus 0.5, because the cast to bytes truncates
    return np.clip(flat, 0, 255, out=flat).astype(np.uint8).reshape(pixels.shape)


class PixelStatistics(NamedTuple):
    """Mean and standard deviation of pixels from 0 to 1: one value per color, or one for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    name: str
    train: Recipe = field(default_factory=Recipe)
    test: Recipe = field(default_factory=Recipe)
    spread: PixelStatistics

    def normalize(self, channels: int, device: torch.device | None = None) -> Normalize:
        """Return the ``Data.arrive`` for images of ``channels`` channels."""
        mean, std = self.spread
        if channels == 1 and len(mean) == 3:
            return Normalize((sum(mean) / 3,), (sum(std) / 3,), device)
        return Normalize(mean, std, device)


_ZERO_TO_ONE = PixelStatistics((0.0,), (1.0,))
_PLUS_MINUS_ONE = PixelStatistics((0.5,), (0.5,))
_IMAGENET = PixelStatistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR = PixelStatistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

PREPROCESSINGS: dict[str, Preprocessing] = {
    made.name: made
    for made in (
        Preprocessing(name="none", spread=_ZERO_TO_ONE),
        Preprocessing(name="lenet", spread=_PLUS_MINUS_ONE),
        Preprocessing(name="cifarnet", train=Recipe(pad=1 / 8, flip=True), spread=_CIFAR),
        Preprocessing(name="vgg", train=Recipe(box=random_scale, flip=True), test=Recipe(box=center), spread=_IMAGENET),
        Preprocessing(
            name="inception",
            train=Recipe(box=partial(random_area, least=0.05), flip=True, colour=0.4),
            test=Recipe(box=center),
            spread=_PLUS_MINUS_ONE,
        ),
        Preprocessing(
            name="resnet", train=Recipe(box=random_area, flip=True), test=Recipe(box=center), spread=_IMAGENET
        ),
    )
}

#: prefix of a model's name -> its preprocessing; all other models use "resnet"
OF_MODELS = {
    "lenet": "lenet",
    "cifarnet": "cifarnet",
    "vgg": "vgg",
    "alexnet": "vgg",
    "overfeat": "vgg",
    "inception": "inception",
    "mobilenet": "inception",
    "nasnet": "inception",
    "pnasnet": "inception",
}


def preprocessing_of(request: Request) -> Preprocessing:
    """Return the preprocessing for ``--preprocessing_name``, by default that of the model.

    The default for small images is "cifarnet", whose crops keep most of the image.
    """
    name = request.get("preprocessing_name")
    if name is None:
        model = str(request.get("model_name", ""))
        name = next((value for start, value in OF_MODELS.items() if model.startswith(start)), "resnet")
        if request.get("image_size", 224) < SMALL and name != "lenet":
            name = "cifarnet"
    if name not in PREPROCESSINGS:
        raise UsageError(f"--preprocessing_name '{name}' is unknown{nearest(name, PREPROCESSINGS)}")
    return PREPROCESSINGS[name]
