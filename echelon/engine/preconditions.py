"""Checks of the model, the optimizers and what is asked of a plan; each failure is a ``UsageError``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from echelon.base.errors import UsageError
from echelon.plan import Plan


def check_model(model: nn.Module) -> None:
    """Raise ``UsageError`` if a lazy parameter of the model has no shape yet."""
    lazy: Callable[[torch.Tensor], bool] = is_lazy  # with torch's annotation, mypy finds the rest unreachable
    for name, parameter in model.named_parameters():
        if lazy(parameter):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UsageError(
                f"'{name}' of a {owner} has no shape before the first batch; run one through the model before "
                "distribute(): with torch.no_grad(): model(batch)"
            )


def check_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise ``UsageError`` if an optimizer runs the model itself through a closure."""
    for key, optimizer in optimizers.items():
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"optimizer '{key}' is {type(optimizer).__name__}, whose step() calls a closure that runs the model "
                "several times, and the engine runs it once a step; use Adam, AdamW or SGD"
            )


def refuse_partial_gradients(plan: Plan, asked: str) -> None:
    """Raise ``UsageError`` if the plan keeps no whole gradients, which ``asked`` needs."""
    if plan.low_memory is not None or plan.dgc is not None:
        by = "low_memory" if plan.low_memory is not None else "dgc"
        raise UsageError(f"{asked}: {by} does not keep whole gradients to look at; leave it out, or train without {by}")
