"""Stored images: pixels in memory, or bytes of a JPEG or PNG file.

Both classes crop and resize in one call, so that a JPEG is decoded at the smallest sufficient scale.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.zoo.preprocessing.boxes import Box

Pixels = NDArray[np.uint8]  #: [height, width, channels]


class Picture(Protocol):
    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...

    def part(self, box: Box, size: int) -> Pixels:
        """Return the part inside the box, resized to [size, size, channels]."""


class ArrayPicture:
    """An image of [height, width, channels] bytes in memory."""

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def part(self, box: Box, size: int) -> Pixels:
        left, upper, right, lower = _scaled(box, 1, 1)
        inside = self._pixels[upper:lower, left:right]
        return inside if inside.shape[:2] == (size, size) else _resized(inside, size)


class EncodedPicture:
    """The bytes of an image file, decoded when ``part`` is called.

    name: name of the image in error messages
    """

    def __init__(self, data: bytes, channels: int, name: str) -> None:
        self._mode, self._name = "L" if channels == 1 else "RGB", name
        pillow = _pillow()
        try:
            self._image: Any = pillow.open(io.BytesIO(data))
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise DataError(f"{name} is no picture that can be read ({_reason(error)}); fetch it again") from None
        self.width, self.height = self._image.size

    def part(self, box: Box, size: int) -> Pixels:
        try:
            image = self._decoded(box, size)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{self._name} is cut off or damaged ({_reason(error)}); fetch it again") from None
        pixels = np.array(image.crop(_scaled(box, image.width / self.width, image.height / self.height)))
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        return pixels if pixels.shape[:2] == (size, size) else _resized(pixels, size)

    def _decoded(self, box: Box, size: int) -> Any:
        """Return the whole image, decoded at 1/2, 1/4 or 1/8 of its size if the box then still has ``size`` pixels."""
        image = self._image
        need = max(size / (box[2] - box[0]), size / (box[3] - box[1]))
        image.draft(
            self._mode, (min(round(self.width * need), self.width), min(round(self.height * need), self.height))
        )
        image.load()
        return image if image.mode == self._mode else image.convert(self._mode)


def resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return [n, channels, h, w] bytes resized to [size, size], with antialiasing when they shrink."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


def with_channels(images: torch.Tensor, channels: int) -> torch.Tensor:
    """Return [n, c, h, w] bytes with ``channels`` channels: gray is repeated, color becomes luma (ITU-R 601)."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1).contiguous()
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True).round().to(torch.uint8)


def _scaled(box: Box, across: float, down: float) -> tuple[int, int, int, int]:
    """Return the box in whole pixels of a scaled image; it is never empty."""
    left, upper, right, lower = (round(edge * by) for edge, by in zip(box, (across, down) * 2, strict=True))
    return left, upper, max(right, left + 1), max(lower, upper + 1)


def _resized(pixels: Pixels, size: int) -> Pixels:
    """Resize pixels with torch, which takes half the time of Pillow; the channels stay last."""
    images = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    return resized(images, size)[0].permute(1, 2, 0).numpy()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading picture files needs Pillow, which is missing; pip install 'echelon[images]'") from None
    return Image


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
