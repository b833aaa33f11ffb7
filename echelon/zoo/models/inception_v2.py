"""BN-Inception (Ioffe and Szegedy 2015, "Batch normalization"), as in slim.

As in slim, the first convolution is separable, and only this one has no batch norm.
"""

from __future__ import annotations

from echelon.zoo import registry
from echelon.zoo.models.inception_blocks import (
    AveragePool,
    Conv,
    Fork,
    InceptionLayer,
    InceptionSpec,
    MaxPool,
    SeparableConv,
    inception,
)

AVERAGE = AveragePool()
LARGEST = MaxPool(3, stride=1, padding=1)
HALVE = MaxPool(3, stride=2, over_the_edge=True)


def _mixed(
    one: int, three: tuple[int, int], double: tuple[int, int], pool: int, pooling: InceptionLayer = AVERAGE
) -> Fork:
    return Fork(
        Conv(one),
        (Conv(three[0]), Conv(three[1], 3)),
        (Conv(double[0]), Conv(double[1], 3), Conv(double[1], 3)),
        (pooling, Conv(pool)),
    )


def _halving(three: tuple[int, int], double: tuple[int, int]) -> Fork:
    return Fork(
        (Conv(three[0]), Conv(three[1], 3, stride=2)),
        (Conv(double[0]), Conv(double[1], 3), Conv(double[1], 3, stride=2)),
        MaxPool(3, stride=2, padding=1),
    )


PLAN = InceptionSpec(
    stem=(SeparableConv(64, 7, stride=2), HALVE, Conv(64), Conv(192, 3), HALVE),
    blocks=(
        _mixed(64, (64, 64), (64, 96), 32),
        _mixed(64, (64, 96), (64, 96), 64),
        _halving((128, 160), (64, 96)),
        _mixed(224, (64, 96), (96, 128), 128),
        _mixed(192, (96, 128), (96, 128), 128),
        _mixed(160, (128, 160), (128, 160), 96),
        _mixed(96, (128, 192), (160, 192), 96),
        _halving((128, 192), (192, 256)),
        _mixed(352, (192, 320), (160, 224), 128),
        _mixed(352, (192, 320), (192, 224), 128, LARGEST),
    ),
    smallest=15,
)

registry.add(
    inception(
        "inception_v2",
        PLAN,
        image_size=224,
        about="BN-Inception: pairs of 3 x 3 convolutions in place of 5 x 5, and batch norm",
        parameters=11_188_224,
        counted={"num_classes": 1000},
        published="slim's test counts 10,173,112 before the classifier, with three numbers a channel of batch norm "
        "(shift, mean, variance); here two are trained (scale, shift)",
    )
)
