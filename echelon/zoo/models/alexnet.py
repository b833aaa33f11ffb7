"""AlexNet (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks") as in torchvision."""

from __future__ import annotations

from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Request
from echelon.zoo.models.image_entry import image_model, large_hidden


class AlexNet(nn.Module):
    """AlexNet: five convolutions, and two hidden layers, which have nearly all of the weights."""

    def __init__(self, classes: int, channels: int = 3, fc_size: int = 4096, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            nn.Sequential(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            nn.Sequential(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten())
        self.hidden = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(256 * 36, fc_size), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(fc_size, fc_size), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(fc_size, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.pool(self.layers(images))))
        return logits


def _build(request: Request) -> nn.Module:
    return AlexNet(request["num_classes"], request["channels"], request["fc_size"], request["dropout"])


registry.add(
    image_model(
        "alexnet",
        _build,
        about="five convolutions and large hidden layers (Krizhevsky 2014, torchvision's layers)",
        parameters=61_100_840,
        published="torchvision, alexnet",
        advice="its hidden layers are 96 % of the weights: gradients are large for the arithmetic, so 16 bits on the "
        "network, or split them ('--split model')",
        tiny={"image_size": 64, "fc_size": 64},
        **large_hidden("before each hidden layer", batch_size=128, num_epochs=90),
    )
)
