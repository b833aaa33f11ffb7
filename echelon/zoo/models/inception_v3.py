"""Inception v3 (Szegedy et al. 2015, "Rethinking the Inception architecture"), as in slim and torchvision."""

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

AVERAGE = AveragePool(zeros_count=True)  # as in torchvision; slim does not count the padding


def _large(pool: int) -> Fork:
    """Return a block for feature maps of 35 x 35."""
    return Fork(
        Conv(64),
        (Conv(48), Conv(64, 5)),
        (Conv(64), Conv(96, 3), Conv(96, 3)),
        (AVERAGE, Conv(pool)),
    )


def _middle(inner: int) -> Fork:
    """Return a block for feature maps of 17 x 17."""
    return Fork(
        Conv(192),
        (Conv(inner), Conv(inner, ROW), Conv(192, COLUMN)),
        (Conv(inner), Conv(inner, COLUMN), Conv(inner, ROW), Conv(inner, COLUMN), Conv(192, ROW)),
        (AVERAGE, Conv(192)),
    )


def _small() -> Fork:
    """Return a block for feature maps of 8 x 8."""
    cross = Fork(Conv(384, (1, 3)), Conv(384, (3, 1)))
    return Fork(Conv(320), (Conv(384), cross), (Conv(448), Conv(384, 3), cross), (AVERAGE, Conv(192)))


PLAN = InceptionSpec(
    stem=(
        Conv(32, 3, stride=2, padded=False),
        Conv(32, 3, padded=False),
        Conv(64, 3),
        HALVE,
        Conv(80),
        Conv(192, 3, padded=False),
        HALVE,
    ),
    blocks=(
        _large(32),
        _large(64),
        _large(64),
        large_to_middle(64, 96, 96),
        _middle(128),
        _middle(160),
        _middle(160),
        _middle(192),
        middle_to_small(320, 192, 192),
        _small(),
        _small(),
    ),
    smallest=75,
    tapped=7,
)

registry.add(
    inception(
        "inception_v3",
        PLAN,
        image_size=299,
        about="Inception v3: 7 x 7 convolutions as rows and columns, and an auxiliary classifier in training",
        parameters=27_161_264,
        counted={"num_classes": 1000},
        published="torchvision's inception_v3, with the auxiliary classifier (without it 23,834,568)",
    )
)
