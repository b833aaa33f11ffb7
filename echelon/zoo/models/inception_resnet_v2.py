"""Inception-ResNet v2 (Szegedy et al. 2016, "Inception-v4, Inception-ResNet"), as in slim and timm."""

from __future__ import annotations

from echelon.zoo import registry
from echelon.zoo.models import inception_v3
from echelon.zoo.models.inception_blocks import (
    HALVE,
    AveragePool,
    Conv,
    Fork,
    InceptionSpec,
    Residual,
    inception,
    large_to_middle,
)


def _first() -> Fork:
    return Fork(
        Conv(96),
        (Conv(48), Conv(64, 5)),
        (Conv(64), Conv(96, 3), Conv(96, 3)),
        (AveragePool(), Conv(64)),
    )


def _large() -> Residual:
    """Return a block for feature maps of 35 x 35."""
    branches = Fork(Conv(32), (Conv(32), Conv(32, 3)), (Conv(32), Conv(48, 3), Conv(64, 3)))
    return Residual(branches, scale=0.17)


def _middle() -> Residual:
    """Return a block for feature maps of 17 x 17."""
    return Residual(Fork(Conv(192), (Conv(128), Conv(160, (1, 7)), Conv(192, (7, 1)))), scale=0.1)


def _from_middle_to_small() -> Fork:
    return Fork(
        (Conv(256), Conv(384, 3, stride=2, padded=False)),
        (Conv(256), Conv(288, 3, stride=2, padded=False)),
        (Conv(256), Conv(288, 3), Conv(320, 3, stride=2, padded=False)),
        HALVE,
    )


def _small(scale: float = 0.2, *, rectified: bool = True) -> Residual:
    """Return a block for feature maps of 8 x 8."""
    return Residual(Fork(Conv(192), (Conv(192), Conv(224, (1, 3)), Conv(256, (3, 1)))), scale, rectified)


PLAN = InceptionSpec(
    stem=inception_v3.PLAN.stem,
    blocks=(
        _first(),
        *(_large() for _ in range(10)),
        large_to_middle(256, 256, 384),
        *(_middle() for _ in range(20)),
        _from_middle_to_small(),
        *(_small() for _ in range(9)),
        _small(1.0, rectified=False),
        Conv(1536),
    ),
    smallest=75,
    tapped=31,
)

registry.add(
    inception(
        "inception_resnet_v2",
        PLAN,
        image_size=299,
        about="Inception-ResNet v2: branches added to their input, with an auxiliary classifier in training",
        parameters=55_843_464,
        counted={"num_classes": 1000, "auxiliary": False},
        published="timm's inception_resnet_v2, which has no auxiliary classifier",
    )
)
