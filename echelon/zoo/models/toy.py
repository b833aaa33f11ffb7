"""Toy models, which train in seconds, for a first look at the command."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from echelon.zoo import registry
from echelon.zoo.entry import Model, Request, Setting


class Toy(nn.Module):
    """A small fully connected network."""

    def __init__(self, inputs: int, hidden: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [inputs, *[hidden] * depth]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(features))
        return logits


def _build(request: Request) -> nn.Module:
    return Toy(request["feature_size"], request["hidden"], request["depth"], request["num_classes"])


def _build_linear(request: Request) -> nn.Module:
    return nn.Sequential(nn.Linear(request["feature_size"], request["outputs"]))


_FEATURES = Setting(name="feature_size", default=16, meaning="numbers that describe an example")

registry.add(
    Model(
        name="toy",
        runner="toy",
        build=_build,
        tasks={"pretrain": ("classify_features",), "finetune": ("classify_features",)},
        about="a small network, for a first look",
        parameters=18_378,
        counted={"num_classes": 10},
        published="16-64-64-64-64-64-10",
        settings=(
            _FEATURES,
            Setting(name="hidden", default=64, meaning="the width of its layers"),
            Setting(name="depth", default=5, meaning="how many there are"),
        ),
        defaults={
            "num_classes": 10,
            "optimizer": "adam",
            "learning_rate": 0.002,
            "learning_rate_decay_type": "fixed",
            "weight_decay": 0.0,
            "num_epochs": 3,
        },
        recompute=("layers.*",),
        cuts=("layers.1", "layers.2", "layers.3", "layers.4", "head"),
        advice="it is too small to gain from any; use it to try them",
        tiny={"hidden": 16, "depth": 2},
    )
)
registry.add(
    Model(
        name="toy_linear",
        runner="toy",
        build=_build_linear,
        tasks={"pretrain": ("regress",), "finetune": ("regress",)},
        about="linear regression, for a first look",
        parameters=17,
        published="16 weights and a bias",
        settings=(_FEATURES, Setting(name="outputs", default=1, meaning="values to predict")),
        defaults={
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "learning_rate_decay_type": "fixed",
            "weight_decay": 0.0,
            "num_epochs": 3,
        },
        advice="it is too small to gain from any; use it to try them",
    )
)
