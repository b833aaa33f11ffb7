"""MobileNets v1 and v2.

v1: Howard et al. 2017, "MobileNets: efficient convolutional neural networks for mobile vision applications".
v2: Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks".
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Request, Setting
from echelon.zoo.models.convolution import ConvNorm, draw_convolutions
from echelon.zoo.models.image_entry import block_names, dropout_setting, image_model

#: (channels, stride) of each separable convolution of v1
SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))

#: (expansion, channels, blocks, stride of the first) of v2
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class Separable(nn.Sequential):
    """A depthwise convolution followed by a pointwise one."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = ConvNorm(inputs, inputs, 3, stride, groups=inputs, activation=nn.ReLU6())
        self.pointwise = ConvNorm(inputs, outputs, 1, activation=nn.ReLU6())


class Inverted(nn.Module):
    """An inverted residual block: wide inside, narrow and linear at both ends.

    It has a residual connection if input and output have the same shape.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        self.expand = ConvNorm(inputs, inner, 1, activation=nn.ReLU6()) if expansion != 1 else nn.Identity()
        self.depthwise = ConvNorm(inner, inner, 3, stride, groups=inner, activation=nn.ReLU6())
        self.project = ConvNorm(inner, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + out if self.residual else out


class MobileNet(nn.Module):
    """A stem, blocks, for v2 one more wide convolution, and global average pooling."""

    def __init__(
        self, stem: nn.Module, blocks: list[nn.Module], last: nn.Module, head: nn.Linear, dropout: float
    ) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.Sequential(*blocks)
        self.last = last
        self.dropout = nn.Dropout(dropout)
        self.head = head
        draw_convolutions(self)
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.last(self.layers(self.stem(images))).mean((2, 3))
        logits: Tensor = self.head(self.dropout(features))
        return logits


def mobilenet_v1(classes: int, channels: int = 3, width: float = 1.0, dropout: float = 0.001) -> MobileNet:
    sizes = [scaled(32, width), *(scaled(outputs, width) for outputs, _ in SEPARABLE)]
    blocks = [Separable(sizes[i], sizes[i + 1], stride) for i, (_, stride) in enumerate(SEPARABLE)]
    return MobileNet(_stem(channels, sizes[0]), [*blocks], nn.Identity(), nn.Linear(sizes[-1], classes), dropout)


def mobilenet_v2(classes: int, channels: int = 3, width: float = 1.0, dropout: float = 0.2) -> MobileNet:
    blocks = list(_inverted_blocks(width))
    inputs, outputs = scaled(INVERTED[-1][1], width), scaled(1280, max(width, 1.0))
    last = ConvNorm(inputs, outputs, 1, activation=nn.ReLU6())
    return MobileNet(_stem(channels, scaled(32, width)), blocks, last, nn.Linear(outputs, classes), dropout)


def scaled(channels: int, width: float) -> int:
    """Return the multiple of 8 nearest to ``channels * width``, but at least 90 % of it."""
    near = max(8, int(channels * width + 4) // 8 * 8)
    return near if near >= 0.9 * channels * width else near + 8


def _stem(channels: int, outputs: int) -> nn.Module:
    return ConvNorm(channels, outputs, 3, stride=2, activation=nn.ReLU6())


def _inverted_blocks(width: float) -> Iterator[nn.Module]:
    inputs = scaled(32, width)
    for expansion, channels, count, stride in INVERTED:
        outputs = scaled(channels, width)
        for i in range(count):
            yield Inverted(inputs, outputs, stride if i == 0 else 1, expansion)
            inputs = outputs


def _build_v1(request: Request) -> nn.Module:
    return mobilenet_v1(request["num_classes"], request["channels"], request["width_multiplier"], request["dropout"])


def _build_v2(request: Request) -> nn.Module:
    return mobilenet_v2(request["num_classes"], request["channels"], request["width_multiplier"], request["dropout"])


_WIDTH = Setting(name="width_multiplier", default=1.0, meaning="of all channels: the papers have 0.25 to 1.4")
_DEFAULTS = {
    "batch_size": 128,
    "optimizer": "momentum",
    "learning_rate": 0.05,
    "learning_rate_decay_factor": 0.98,
    "num_epochs_per_decay": 1.0,
    "num_epochs": 200,
    "warmup_steps": 100,
    "warmup_scheme": "linear",
}

registry.add(
    image_model(
        "mobilenet_v1",
        _build_v1,
        about="separable convolutions, for small devices (Howard et al. 2017)",
        settings=(dropout_setting(0.001, "before the head"), _WIDTH),
        parameters=4_231_976,
        counted={"num_classes": 1000},
        published="Keras, MobileNet (trainable), and timm, mobilenetv1_100",
        defaults=_DEFAULTS,
        recompute=("layers.*",),
        cuts=block_names(len(SEPARABLE)),
        tiny={"image_size": 32, "width_multiplier": 0.25},
    )
)
registry.add(
    image_model(
        "mobilenet_v2",
        _build_v2,
        about="inverted residuals, for small devices (Sandler et al. 2018)",
        settings=(dropout_setting(0.2, "before the head"), _WIDTH),
        parameters=3_504_872,
        counted={"num_classes": 1000},
        published="torchvision, mobilenet_v2",
        defaults=_DEFAULTS,
        recompute=("layers.*",),
        cuts=block_names(sum(count for _, _, count, _ in INVERTED)),
        tiny={"image_size": 32, "width_multiplier": 0.25},
    )
)
