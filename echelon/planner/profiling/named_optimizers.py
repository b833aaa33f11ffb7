"""Optimizers that can be named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from echelon.base.errors import UsageError, nearest

if TYPE_CHECKING:  # a name is checked before torch is imported
    import torch
    from torch import nn

#: By name: the class in torch.optim, and its options.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
}


#: By name: the class in echelon.optim, and its options.
OWN: dict[str, tuple[str, dict[str, Any]]] = {"lars": ("LARS", {"lr": 0.1}), "lamb": ("LAMB", {"lr": 0.1})}


def named_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of this name, whose state can be measured. Raises UsageError for an unknown name."""
    check_name(name)
    kind, options = optimizer_class(name)
    return kind(parameters, **options)


def check_name(name: str) -> None:
    """Raise UsageError if there is no optimizer of this name."""
    known = {**NAMED, **OWN}
    if name not in known:
        raise UsageError(f"--optimizer has no '{name}'{nearest(name, known)}: use one of {', '.join(known)}")


def optimizer_class(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the options of the optimizer of this name."""
    import torch

    from echelon import optim

    place, (kind, options) = (optim, OWN[name]) if name in OWN else (torch.optim, NAMED[name])
    return getattr(place, kind), options
