"""Building blocks of the inceptions: convolutions with batch norm, parallel branches, and an auxiliary classifier.

A network is described by layers (``Conv``, ``MaxPool``, ``Fork``, ...) without input channels; these are computed when
the network is built, so that ``depth_multiplier`` can make every convolution wider or narrower.

Batch norm has both scale and shift, as in torchvision and timm, so their weights can be loaded; slim omits the scale.
The epsilon is that of slim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.zoo.entry import Model, Request, Setting
from echelon.zoo.models.image_entry import block_names, dropout_setting, image_model

EPSILON = 1e-3
NARROWEST = 16  #: smallest number of channels of a convolution with a small ``depth_multiplier``, as in slim

# ---- modules ----


class ConvBlock(nn.Module):
    """A convolution with batch norm and ReLU."""

    def __init__(self, conv: nn.Module, outputs: int) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(outputs, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Branches(nn.Module):
    """Parallel branches on the same input, whose outputs are concatenated as channels."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class ResidualBranches(nn.Module):
    """Parallel branches whose output is projected to the channels of the input, scaled down and added to the input."""

    def __init__(self, branches: Branches, inner: int, channels: int, *, scale: float, rectified: bool) -> None:
        super().__init__()
        self.branches = branches.branches
        self.back = nn.Conv2d(inner, channels, 1)
        self.scale, self.rectified = scale, rectified

    def forward(self, x: Tensor) -> Tensor:
        side = torch.cat([branch(x) for branch in self.branches], 1)
        total = x + self.scale * self.back(side)
        return F.relu(total) if self.rectified else total


class AuxiliaryClassifier(nn.Module):
    """A classifier on the feature maps in the middle of the network, used in training only."""

    FULL = 17  # height and width of these feature maps for images of 299 x 299

    def __init__(self, inputs: int, num_classes: int, width: float) -> None:
        super().__init__()
        self.layers, outputs = chain((Conv(128), Conv(768, 5, padded=False)), inputs, width)
        self.head = nn.Linear(outputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # The feature maps of smaller images are too small for the published pooling and the 5 x 5 convolution after it.
        full = min(x.shape[-2:]) >= self.FULL
        pooled = F.avg_pool2d(x, 5, stride=3) if full else F.adaptive_avg_pool2d(x, 5)
        logits: Tensor = self.head(self.layers(pooled).mean((2, 3)))
        return logits


# ---- descriptions of layers ----


class InceptionLayer(Protocol):
    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        """Return the module for ``inputs`` input channels, and its number of output channels."""


@dataclass(frozen=True)
class Conv:
    """A convolution; if ``padded``, feature maps keep their size (with stride 1), else only whole windows are used."""

    channels: int
    kernel: int | tuple[int, int] = 1
    stride: int = 1
    padded: bool = True

    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        high, wide = (self.kernel, self.kernel) if isinstance(self.kernel, int) else self.kernel
        padding = (high // 2, wide // 2) if self.padded else (0, 0)
        outputs = widened(self.channels, width)
        return ConvBlock(nn.Conv2d(inputs, outputs, (high, wide), self.stride, padding, bias=False), outputs), outputs


@dataclass(frozen=True)
class SeparableConv:
    """A depthwise convolution with several outputs per channel, then a 1 x 1 one; as in slim, without batch norm."""

    channels: int
    kernel: int
    stride: int
    most: int = 8  # largest number of depthwise outputs per channel

    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        outputs = widened(self.channels, width)
        middle = inputs * max(1, min(outputs // inputs, self.most))
        alone = nn.Conv2d(inputs, middle, self.kernel, self.stride, self.kernel // 2, groups=inputs, bias=False)
        return nn.Sequential(alone, nn.Conv2d(middle, outputs, 1), nn.ReLU()), outputs


@dataclass(frozen=True)
class MaxPool:
    """Max pooling; with ``over_the_edge``, windows that cross the border are used too, so 112 becomes 56, not 55."""

    kernel: int = 3
    stride: int = 2
    padding: int = 0
    over_the_edge: bool = False

    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        return nn.MaxPool2d(self.kernel, self.stride, self.padding, ceil_mode=self.over_the_edge), inputs


@dataclass(frozen=True)
class AveragePool:
    """Average pooling of 3 x 3 that keeps the size; with ``zeros_count``, padding counts in the mean at the border."""

    zeros_count: bool = False

    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=self.zeros_count), inputs


class Fork:
    """Parallel branches, each a layer or a sequence of layers."""

    def __init__(self, *branches: InceptionLayer | tuple[InceptionLayer, ...]) -> None:
        self.branches = [branch if isinstance(branch, tuple) else (branch,) for branch in branches]

    def build(self, inputs: int, width: float) -> tuple[Branches, int]:
        built = [chain(layers, inputs, width) for layers in self.branches]
        return Branches([module for module, _ in built]), sum(outputs for _, outputs in built)


@dataclass(frozen=True)
class Residual:
    fork: Fork
    scale: float
    rectified: bool = True

    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        branches, inner = self.fork.build(inputs, width)
        return ResidualBranches(branches, inner, inputs, scale=self.scale, rectified=self.rectified), inputs


@dataclass(frozen=True)
class Chain:
    """A sequence of layers as one block."""

    layers: tuple[InceptionLayer, ...]

    def build(self, inputs: int, width: float) -> tuple[nn.Module, int]:
        return chain(self.layers, inputs, width)


def widened(channels: int, width: float) -> int:
    return channels if width == 1 else max(int(channels * width), NARROWEST)


def chain(layers: Sequence[InceptionLayer], inputs: int, width: float) -> tuple[nn.Sequential, int]:
    modules = []
    for layer in layers:
        module, inputs = layer.build(inputs, width)
        modules.append(module)
    return nn.Sequential(*modules), inputs


# ---- the network ----


@dataclass(frozen=True)
class InceptionSpec:
    """The description of a network.

    smallest: smallest image size that the last block can process
    tapped:   index of the block whose output is the input of the auxiliary classifier
    """

    stem: tuple[InceptionLayer, ...]
    blocks: tuple[InceptionLayer, ...]
    smallest: int
    tapped: int | None = None


class Inception(nn.Module):
    """An inception: images [n, channels, h, w] to logits [n, num_classes], in training with the auxiliary logits."""

    def __init__(
        self, plan: InceptionSpec, num_classes: int, *, channels: int, width: float, dropout: float, auxiliary: bool
    ) -> None:
        super().__init__()
        self.tapped = plan.tapped if auxiliary else None
        self.stem, outputs = chain(plan.stem, channels, width)
        self.blocks = nn.ModuleList()
        for number, layer in enumerate(plan.blocks):
            block, outputs = layer.build(outputs, width)
            self.blocks.append(block)
            if number == self.tapped:
                self.auxiliary = AuxiliaryClassifier(outputs, num_classes, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(outputs, num_classes)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        second: Tensor | None = None
        x = self.stem(images)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.tapped and self.training:
                second = self.auxiliary(x)
        logits: Tensor = self.head(self.dropout(x.mean((2, 3))))
        return logits if second is None else (logits, second)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# ---- blocks of several networks ----

HALVE = MaxPool(3, stride=2)
ROW, COLUMN = (1, 7), (7, 1)


def large_to_middle(first: int, second: int, third: int) -> Fork:
    """Return the block from feature maps of 35 x 35 to 17 x 17."""
    return Fork(
        Conv(384, 3, stride=2, padded=False),
        (Conv(first), Conv(second, 3), Conv(third, 3, stride=2, padded=False)),
        HALVE,
    )


def middle_to_small(plain: int, first: int, second: int) -> Fork:
    """Return the block from feature maps of 17 x 17 to 8 x 8."""
    return Fork(
        (Conv(192), Conv(plain, 3, stride=2, padded=False)),
        (Conv(first), Conv(first, ROW), Conv(second, COLUMN), Conv(second, 3, stride=2, padded=False)),
        HALVE,
    )


def inception(name: str, plan: InceptionSpec, image_size: int, **entry: Any) -> Model:
    """Return the entry of the network that ``plan`` describes."""
    auxiliary = Setting(
        name="auxiliary", default=True, meaning="train a second classifier halfway, with 0.4 of its loss added"
    )
    return image_model(
        name,
        functools.partial(_build, plan),
        image_size=image_size,
        settings=(
            Setting(name="depth_multiplier", default=1.0, meaning="channels of each convolution, against the paper's"),
            dropout_setting(0.2, "before the classifier"),
            *((auxiliary,) if plan.tapped is not None else ()),
        ),
        recompute=("blocks.*",),
        cuts=block_names(len(plan.blocks), "blocks"),
        tiny={"image_size": max(plan.smallest, 32), "depth_multiplier": 0.125},
        **entry,
    )


def _build(plan: InceptionSpec, request: Request) -> Inception:
    size, width = request["image_size"], request["depth_multiplier"]
    if size < plan.smallest:
        raise UsageError(
            f"--image_size {size}: the model halves images too often for that; take {plan.smallest} or more"
        )
    if width <= 0:
        raise UsageError(f"--depth_multiplier {width}: no channels would be left; take a number above 0")
    return Inception(
        plan,
        request["num_classes"],
        channels=request["channels"],
        width=width,
        dropout=request["dropout"],
        auxiliary=request.get("auxiliary", False),
    )
