"""Inception v4 (Szegedy et al. 2016, "Inception-v4, Inception-ResNet"), as in slim and timm."""

from __future__ import annotations

from echelon.zoo import registry
from echelon.zoo.models.inception_blocks import (
    COLUMN,
    HALVE,
    ROW,
    AveragePool,
    Conv,
    Fork,
    InceptionSpec,
    inception,
    large_to_middle,
    middle_to_small,
)

AVERAGE = AveragePool()


def _large() -> Fork:
    """Return a block for feature maps of 35 x 35."""
    return Fork(
        Conv(96),
        (Conv(64), Conv(96, 3)),
        (Conv(64), Conv(96, 3), Conv(96, 3)),
        (AVERAGE, Conv(96)),
    )


def _middle() -> Fork:
    """Return a block for feature maps of 17 x 17."""
    return Fork(
        Conv(384),
        (Conv(192), Conv(224, ROW), Conv(256, COLUMN)),
        (Conv(192), Conv(192, COLUMN), Conv(224, ROW), Conv(224, COLUMN), Conv(256, ROW)),
        (AVERAGE, Conv(128)),
    )


def _small() -> Fork:
    """Return a block for feature maps of 8 x 8."""
    cross = Fork(Conv(256, (1, 3)), Conv(256, (3, 1)))
    return Fork(
        Conv(256),
        (Conv(384), cross),
        (Conv(384), Conv(448, (3, 1)), Conv(512, (1, 3)), cross),
        (AVERAGE, Conv(256)),
    )


PLAN = InceptionSpec(
    stem=(
        Conv(32, 3, stride=2, padded=False),
        Conv(32, 3, padded=False),
        Conv(64, 3),
        Fork(HALVE, Conv(96, 3, stride=2, padded=False)),
        Fork(
            (Conv(64), Conv(96, 3, padded=False)),
            (Conv(64), Conv(64, ROW), Conv(64, COLUMN), Conv(96, 3, padded=False)),
        ),
        Fork(Conv(192, 3, stride=2, padded=False), HALVE),
    ),
    blocks=(
        *(_large() for _ in range(4)),
        large_to_middle(192, 224, 256),
        *(_middle() for _ in range(7)),
        middle_to_small(192, 256, 320),
        *(_small() for _ in range(3)),
    ),
    smallest=75,
    tapped=11,
)

registry.add(
    inception(
        "inception_v4",
        PLAN,
        image_size=299,
        about="Inception v4: deeper and more even than v3, with an auxiliary classifier in training",
        parameters=42_679_816,
        counted={"num_classes": 1000, "auxiliary": False},
        published="timm's inception_v4, which has no auxiliary classifier",
    )
)
