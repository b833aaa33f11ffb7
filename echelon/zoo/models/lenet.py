"""LeNet as in TF-slim: wider than the original, with ReLUs, max pooling and dropout.

The original is LeCun et al. 1998, "Gradient-based learning applied to document recognition".
"""

from __future__ import annotations

from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Request
from echelon.zoo.models.image_entry import SMALL, dropout_setting, image_model


class LeNet(nn.Module):
    """LeNet: two convolutions, each pooled to half the size, and one hidden layer."""

    def __init__(self, classes: int, image_size: int = 28, channels: int = 1, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(_layer(channels, 32), _layer(32, 64))
        side = image_size // 2 // 2
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(64 * side * side, 1024), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(1024, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.layers(images)))
        return logits


def _layer(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))


def _build(request: Request) -> nn.Module:
    return LeNet(request["num_classes"], request["image_size"], request["channels"], request["dropout"])


registry.add(
    image_model(
        "lenet",
        _build,
        about="a small convnet for digits (LeCun et al. 1998, TF-slim's layers)",
        image_size=28,
        channels=1,
        settings=(dropout_setting(0.5, "before the head"),),
        parameters=3_274_634,
        published="the layers of TF-slim's lenet",
        **SMALL,
    )
)
