"""Residual networks v1 and v2.

v1: He et al. 2015, "Deep residual learning for image recognition", with the stride of a bottleneck in its 3 x 3
convolution, as in torchvision ("v1.5"). v2: He et al. 2016, "Identity mappings in deep residual networks": norm and
ReLU come before each convolution, and the residual path between blocks has additions only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.convolution import ConvNorm, draw_convolutions
from echelon.zoo.models.image_entry import AMP_ADVICE, block_names, image_model

#: number of layers -> number of blocks at each of the four resolutions
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

BOTTLENECK_FROM = 50  #: number of layers from which blocks are bottlenecks; others have two 3 x 3 convolutions

PARAMETERS = {
    1: {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808},
    2: {18: 11_687_720, 34: 21_795_880, 50: 25_549_352, 101: 44_541_480, 152: 60_185_128},
}


class Basic(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, width, 3, stride, activation=nn.ReLU())
        self.second = ConvNorm(width, width, 3)
        self.shortcut = _shortcut_with_norm(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, width, 1, activation=nn.ReLU())
        self.second = ConvNorm(width, width, 3, stride, activation=nn.ReLU())
        self.third = ConvNorm(width, width * self.expansion, 1)
        self.shortcut = _shortcut_with_norm(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.third(self.second(self.first(x))) + self.shortcut(x))


class _NormFirst(nn.Module):
    """A block with norms first; a shortcut that changes the shape starts after the first norm and ReLU.

    Any other shortcut is the input itself.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None
        self.norm = nn.BatchNorm2d(inputs)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm(x))
        kept: Tensor = x if self.shortcut is None else self.shortcut(active)
        return self.residual(active) + kept

    def residual(self, active: Tensor) -> Tensor:
        raise NotImplementedError


class BasicNormFirst(_NormFirst):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.first = ConvNorm(inputs, width, 3, stride, activation=nn.ReLU())
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def residual(self, active: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(active))
        return out


class BottleneckNormFirst(_NormFirst):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width * self.expansion, stride)
        self.first = ConvNorm(inputs, width, 1, activation=nn.ReLU())
        self.second = ConvNorm(width, width, 3, stride, activation=nn.ReLU())
        self.third = nn.Conv2d(width, width * self.expansion, 1, bias=False)

    def residual(self, active: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(active)))
        return out


Block = type[Basic] | type[Bottleneck] | type[BasicNormFirst] | type[BottleneckNormFirst]


class ResNet(nn.Module):
    """Residual network with four resolutions, each half as high and wide as the previous one, with twice the channels.

    version: 1, or 2 for norms before the convolutions
    width:   number of channels of the stem
    """

    def __init__(self, depth: int, classes: int, version: int = 1, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        block = _block(depth, version)
        features = 8 * width * block.expansion
        self.stem = _stem(channels, width, version)
        self.layers = nn.Sequential(*_blocks(block, BLOCKS[depth], width))
        self.norm = nn.Identity() if version == 1 else nn.Sequential(nn.BatchNorm2d(features), nn.ReLU())
        self.head = nn.Linear(features, classes)
        draw_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.layers(self.stem(images)))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


def _block(depth: int, version: int) -> Block:
    if depth < BOTTLENECK_FROM:
        return Basic if version == 1 else BasicNormFirst
    return Bottleneck if version == 1 else BottleneckNormFirst


def _stem(channels: int, width: int, version: int) -> nn.Module:
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    if version == 1:
        return nn.Sequential(ConvNorm(channels, width, 7, stride=2, activation=nn.ReLU()), pool)
    return nn.Sequential(nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False), pool)


def _blocks(block: Block, counts: tuple[int, ...], width: int) -> Iterator[nn.Module]:
    inputs = width
    for size, count in enumerate(counts):
        for i in range(count):
            yield block(inputs, width * 2**size, stride=2 if size and i == 0 else 1)
            inputs = width * 2**size * block.expansion


def _shortcut_with_norm(inputs: int, outputs: int, stride: int) -> nn.Module:
    return ConvNorm(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else nn.Identity()


def _entry(depth: int, version: int) -> Model:
    def build(request: Request) -> nn.Module:
        return ResNet(depth, request["num_classes"], version, request["channels"], request["width"])

    return image_model(
        f"resnet_v{version}_{depth}",
        build,
        about=f"{depth} layers with residual connections ("
        + ("He et al. 2015, stride in the 3 x 3" if version == 1 else "He et al. 2016, norms first")
        + ")",
        settings=(Setting(name="width", default=64, meaning="channels of the first blocks"),),
        parameters=PARAMETERS[version][depth],
        counted={"num_classes": 1000},
        published=f"torchvision, resnet{depth}" if version == 1 else f"timm, resnetv2_{depth}",
        defaults={
            "batch_size": 128,
            "optimizer": "momentum",
            "learning_rate": 0.05,
            "weight_decay": 0.0001,
            "learning_rate_decay_factor": 0.1,
            "num_epochs_per_decay": 30.0,
            "num_epochs": 90,
            "warmup_steps": 100,
            "warmup_scheme": "linear",
        },
        recompute=("layers.*",),
        cuts=block_names(sum(BLOCKS[depth])),
        advice=f"{AMP_ADVICE}; the rate is for 128 images a step, so add lr_scaling: linear with more replicas, and "
        "lars above 8,000 images a step",
        tiny={"image_size": 32, "width": 8},
    )


for _depth in BLOCKS:
    for _version in (1, 2):
        registry.add(_entry(_depth, _version))
