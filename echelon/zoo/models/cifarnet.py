"""CifarNet: the small convnet of Krizhevsky's cuda-convnet for CIFAR-10, as in TF-slim."""

from __future__ import annotations

from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Request
from echelon.zoo.models.image_entry import SMALL, dropout_setting, image_model


class CifarNet(nn.Module):
    """CifarNet: two convolutions with pooling and local response normalization, and two hidden layers."""

    def __init__(self, classes: int, image_size: int = 32, channels: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(_convolution(channels), nn.ReLU(), nn.MaxPool2d(2), _response_norm()),
            nn.Sequential(_convolution(64), nn.ReLU(), _response_norm(), nn.MaxPool2d(2)),
        )
        side = image_size // 2 // 2
        self.hidden = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * side * side, 384),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(384, 192),
            nn.ReLU(),
        )
        self.head = nn.Linear(192, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.layers(images)))
        return logits


def _convolution(inputs: int) -> nn.Module:
    return nn.Conv2d(inputs, 64, 5, padding=2)


def _response_norm() -> nn.Module:
    """Return the local response normalization over 9 channels.

    torch divides alpha by the number of channels and TensorFlow does not: this is TensorFlow's alpha of 0.001 / 9.
    """
    return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)


def _build(request: Request) -> nn.Module:
    return CifarNet(request["num_classes"], request["image_size"], request["channels"], request["dropout"])


registry.add(
    image_model(
        "cifarnet",
        _build,
        about="a small convnet for 32 x 32 images (Krizhevsky 2009, TF-slim's layers)",
        image_size=32,
        settings=(dropout_setting(0.5, "between the hidden layers"),),
        parameters=1_756_426,
        published="the layers of TF-slim's cifarnet",
        **SMALL,
    )
)
