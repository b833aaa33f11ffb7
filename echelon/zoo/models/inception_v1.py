"""GoogLeNet (Szegedy et al. 2014, "Going deeper with convolutions") with batch norm, as in slim and torchvision.

As in these, 3 x 3 convolutions replace the 5 x 5 ones of the paper, and there are no auxiliary classifiers.
"""

from __future__ import annotations

from echelon.zoo import registry
from echelon.zoo.models.inception_blocks import Chain, Conv, Fork, InceptionSpec, MaxPool, inception


def _mixed(one: int, three: tuple[int, int], double: tuple[int, int], pool: int) -> Fork:
    return Fork(
        Conv(one),
        (Conv(three[0]), Conv(three[1], 3)),
        (Conv(double[0]), Conv(double[1], 3)),
        (MaxPool(3, stride=1, padding=1), Conv(pool)),
    )


HALVE = MaxPool(3, stride=2, over_the_edge=True)

PLAN = InceptionSpec(
    stem=(Conv(64, 7, stride=2), HALVE, Conv(64), Conv(192, 3), HALVE),
    blocks=(
        _mixed(64, (96, 128), (16, 32), 32),
        _mixed(128, (128, 192), (32, 96), 64),
        Chain((HALVE, _mixed(192, (96, 208), (16, 48), 64))),
        _mixed(160, (112, 224), (24, 64), 64),
        _mixed(128, (128, 256), (24, 64), 64),
        _mixed(112, (144, 288), (32, 64), 64),
        _mixed(256, (160, 320), (32, 128), 128),
        Chain((MaxPool(2, stride=2, over_the_edge=True), _mixed(256, (160, 320), (32, 128), 128))),
        _mixed(384, (192, 384), (48, 128), 128),
    ),
    smallest=15,
)

registry.add(
    inception(
        "inception_v1",
        PLAN,
        image_size=224,
        about="GoogLeNet with batch norm: 22 layers of branches side by side",
        parameters=6_624_904,
        counted={"num_classes": 1000},
        published="torchvision's googlenet without auxiliary classifiers",
    )
)
