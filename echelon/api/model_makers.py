"""Model and optimizer of ``distribute()``, made by functions where functions were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from echelon.api.call_arguments import Optimizers
from echelon.base.errors import UsageError
from echelon.construction.deferred import deferred


def made_model(given: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model; a function without arguments is called in ``deferred()``."""
    if isinstance(given, nn.Module | type) or not callable(given):
        return cast("nn.Module", given)  # check_types() refuses a class, or what is no module
    with deferred():
        model = given()
    if not isinstance(model, nn.Module):
        raise UsageError(f"distribute() was given a function for the model that returns {model!r}; return the module")
    return model


def made_optimizer(given: Any, model: nn.Module) -> Optimizers:
    """Return the optimizer; a function is called with the model."""
    is_maker = callable(given) and not isinstance(given, torch.optim.Optimizer | type)
    return cast("Optimizers", given(model) if is_maker else given)
