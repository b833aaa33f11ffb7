"""Crop boxes of images; random ones draw from ``random``, which the loader seeds for every sample."""

from __future__ import annotations

import math
import random

Box = tuple[float, float, float, float]  #: left, upper, right, lower edge, in pixels

CROP_TRIES = 10


def whole(width: int, height: int) -> Box:
    return (0, 0, width, height)


def center(width: int, height: int, part: float = 0.875) -> Box:
    """Return a centered square of ``part`` of the shorter side.

    The default equals resizing the shorter side to 256 and cropping 224.
    """
    side = part * min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return (left, upper, left + side, upper + side)


def random_area(width: int, height: int, least: float = 0.08, ratio: float = 4 / 3) -> Box:
    """Return a random box of ``least`` to 100 % of the area and an aspect ratio of 1/ratio to ratio.

    The method is that of Szegedy et al. 2015.
    """
    for _ in range(CROP_TRIES):
        area = random.uniform(least, 1.0) * width * height
        shape = math.exp(random.uniform(-math.log(ratio), math.log(ratio)))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            left, upper = random.randint(0, width - across), random.randint(0, height - down)
            return (left, upper, left + across, upper + down)
    return center(width, height, 1.0)


def random_scale(width: int, height: int, least: float = 224 / 512, most: float = 224 / 256) -> Box:
    """Return a random square: the shorter side is resized to 256..512 and 224 are cropped, as for VGG."""
    side = min(width, height) / random.uniform(1 / most, 1 / least)
    left, upper = random.uniform(0, width - side), random.uniform(0, height - side)
    return (left, upper, left + side, upper + side)
