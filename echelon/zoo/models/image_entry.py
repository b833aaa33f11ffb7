"""Shared parts of the entries of image models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from echelon.strategy.annotations.annotate import split
from echelon.zoo.entry import Model, Request, Setting

AMP_ADVICE = "16-bit arithmetic about doubles the speed on GPUs with tensor cores and halves the activations"

#: The part of an entry that small convnets for ten classes share.
SMALL: dict[str, Any] = {
    "counted": {"num_classes": 10},
    "defaults": {
        "num_classes": 10,
        "batch_size": 64,
        "optimizer": "momentum",
        "learning_rate": 0.05,
        "learning_rate_decay_factor": 0.7,
        "num_epochs_per_decay": 1.0,
        "num_epochs": 10,
    },
    "recompute": ("layers.*",),
    "cuts": ("layers.1", "hidden"),
    "strategy": {},
    "advice": "plain data parallelism: it is small",
}


def image_model(
    name: str,
    build: Callable[[Request], nn.Module],
    *,
    image_size: int = 224,
    channels: int = 3,
    settings: tuple[Setting, ...] = (),
    tiny: Mapping[str, Any] | None = None,
    **entry: Any,
) -> Model:
    """Return the entry of an image model, with the task, image settings and split head that all of them share."""
    sizes = (
        Setting(name="image_size", default=image_size, meaning="height and width of an image"),
        Setting(name="channels", default=channels, meaning="of an image: 3, or 1 for grey ones"),
    )
    values: dict[str, Any] = {"split": {"head": split()}, "strategy": {"amp": "bf16"}, "advice": AMP_ADVICE}
    return Model(
        name=name,
        runner="images",
        build=build,
        tasks={"pretrain": ("classify_images",), "finetune": ("classify_images",)},
        settings=sizes + settings,
        tiny={"num_classes": 10} | dict(tiny or {}),
        **values | entry,
    )


def dropout_setting(default: float, meaning: str) -> Setting:
    return Setting(name="dropout", default=default, meaning=meaning)


def large_hidden(dropout: str, **defaults: Any) -> dict[str, Any]:
    """Return the part of an entry that convnets of five blocks with two large hidden layers share.

    dropout:  description of the setting
    defaults: defaults of common parameters, beside those that these models share
    """
    return {
        "settings": (
            dropout_setting(0.5, dropout),
            Setting(name="fc_size", default=4096, meaning="width of the two hidden layers"),
        ),
        "counted": {"num_classes": 1000},
        "defaults": {
            "optimizer": "momentum",
            "learning_rate": 0.01,
            "weight_decay": 0.0005,
            "learning_rate_decay_factor": 0.1,
            "num_epochs_per_decay": 30.0,
            **defaults,
        },
        "recompute": ("layers.*",),
        "cuts": (*block_names(5)[1:], "hidden"),
        "split": {"hidden": split(), "head": split()},
        "strategy": {"amp": "bf16", "fp16_allreduce": True},
    }


def block_names(count: int, parent: str = "layers") -> tuple[str, ...]:
    """Return the names ``layers.0`` to ``layers.{count - 1}``."""
    return tuple(f"{parent}.{i}" for i in range(count))
