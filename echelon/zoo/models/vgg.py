"""VGG (Simonyan and Zisserman 2014, "Very deep convolutional networks for large-scale image recognition")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Model, Request
from echelon.zoo.models.convolution import draw_convolutions
from echelon.zoo.models.image_entry import image_model, large_hidden

WIDTHS = (64, 128, 256, 512, 512)

#: number of layers -> number of convolutions of each of the five blocks
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}

PARAMETERS = {11: 132_863_336, 16: 138_357_544, 19: 143_667_240}


class Vgg(nn.Module):
    """VGG without batch norm: five blocks of 3 x 3 convolutions, each pooled to half size, and two hidden layers."""

    def __init__(
        self, classes: int, convolutions: Sequence[int], channels: int = 3, fc_size: int = 4096, dropout: float = 0.5
    ) -> None:
        super().__init__()
        inputs = (channels, *WIDTHS)
        self.layers = nn.Sequential(*(_block(inputs[i], WIDTHS[i], count) for i, count in enumerate(convolutions)))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten())
        self.hidden = nn.Sequential(
            nn.Linear(512 * 49, fc_size), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(fc_size, fc_size), nn.ReLU(), nn.Dropout(dropout),
        )  # fmt: skip
        self.head = nn.Linear(fc_size, classes)
        draw_convolutions(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.pool(self.layers(images))))
        return logits


def _block(inputs: int, outputs: int, convolutions: int) -> nn.Module:
    made: list[nn.Module] = []
    for _ in range(convolutions):
        made += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*made, nn.MaxPool2d(2))


def _entry(depth: int) -> Model:
    def build(request: Request) -> nn.Module:
        return Vgg(
            request["num_classes"], CONVOLUTIONS[depth], request["channels"], request["fc_size"], request["dropout"]
        )

    return image_model(
        f"vgg_{depth}",
        build,
        about=f"{depth} layers of 3 x 3 convolutions and large hidden layers (Simonyan and Zisserman 2014)",
        parameters=PARAMETERS[depth],
        published=f"torchvision, vgg{depth}",
        advice="its hidden layers are most of the weights: gradients are large, so 16 bits on the network, or split "
        "them ('--split model')",
        tiny={"image_size": 32, "fc_size": 64},
        **large_hidden("after each hidden layer", batch_size=64, num_epochs=74),
    )


for _depth in CONVOLUTIONS:
    registry.add(_entry(_depth))
