"""Classification with very many classes (faces, products, words), where the last layer has most of the weights."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from echelon.strategy.annotations.annotate import replicate, split
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting


class ManyClasses(nn.Module):
    """A feature network with a much larger linear head."""

    def __init__(self, features: nn.Module, hidden: int, classes: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(hidden, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(inputs))
        return logits


def _of_vectors(inputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(_normed(nn.Linear(inputs, hidden, bias=False)), _normed(nn.Linear(hidden, hidden, bias=False)))


def _normed(layer: nn.Linear) -> nn.Module:
    return nn.Sequential(layer, nn.BatchNorm1d(layer.out_features), nn.ReLU())


def _of_images(channels: int, hidden: int) -> nn.Module:
    """Return four convolutions, each of which halves the image, and global average pooling."""
    widths = [channels, *(max(8, hidden // part) for part in (8, 4, 2)), hidden]
    layers = [
        nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _build(request: Request) -> nn.Module:
    hidden = request["hidden"]
    if request.task == "classify_images":
        return ManyClasses(_of_images(request["channels"], hidden), hidden, request["num_classes"])
    return ManyClasses(_of_vectors(request["feature_size"], hidden), hidden, request["num_classes"])


registry.add(
    Model(
        name="large_scale_classification",
        runner="classification",
        build=_build,
        tasks={
            "pretrain": ("classify_features", "classify_images"),
            "finetune": ("classify_features", "classify_images"),
        },
        about="a head of 100,000 classes on ordinary features: worth splitting over all devices",
        settings=(
            Setting(name="feature_size", default=512, meaning="numbers that describe an example"),
            Setting(name="hidden", default=512, meaning="numbers that the head is given"),
            Setting(name="image_size", default=64, meaning="height and width, where examples are images"),
            Setting(name="channels", default=3, meaning="of an image, where examples are images"),
        ),
        defaults={
            "num_classes": 100_000,
            "batch_size": 64,
            "optimizer": "adam",
            "learning_rate": 0.001,
            "learning_rate_decay_type": "fixed",
            "weight_decay": 0.0,
            "num_epochs": 10,
        },
        split={"features": replicate(), "head": split()},
        advice="--split model: every device has the features whole, a batch of its own, and a part of the classes; the "
        "head's gradient never travels",
        cuts=("head",),
        tiny={"num_classes": 50, "feature_size": 8, "hidden": 16, "image_size": 16},
    )
)
