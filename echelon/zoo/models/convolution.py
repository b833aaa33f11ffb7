"""Convolutions of image models: followed by a norm and an activation, and initialized for ReLUs."""

from __future__ import annotations

from torch import nn


class ConvNorm(nn.Sequential):
    """A convolution that keeps the size (apart from its stride), with batch norm and an optional activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        if activation is not None:
            self.activation = activation


def draw_convolutions(model: nn.Module) -> None:
    """Initialize convolutions as in He et al. 2015, by fan-out, so that gradients keep their size in backward."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
