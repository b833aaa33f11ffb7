"""A twin of an optimizer: the same class and settings, other parameters, to find out what its step does."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: Ways to step that want a device.
PLAIN: dict[str, Any] = {"foreach": False, "fused": None, "capturable": False}


def copy_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    twins: dict[int, torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings for ``groups``, without state and hooks.

    ``twins`` collects it, and those of the optimizers that it holds (SAM, Lookahead), by the original's id.
    """
    twins = {} if twins is None else twins
    if id(optimizer) in twins:
        return twins[id(optimizer)]
    twin = twins[id(optimizer)] = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # A scheduler puts a `step` on the instance that steps the original: the twin has its class's.
        if not (callable(value) and callable(getattr(type(optimizer), name, None))):
            inner = isinstance(value, torch.optim.Optimizer)
            twin.__dict__[name] = copy_optimizer(value, groups, twins) if inner else _own(value)
    twin.__dict__.update({name: OrderedDict() for name in _HOOKS})  # a user's hook expects the user's optimizer
    twin.__dict__.update(state=defaultdict(dict), param_groups=groups)
    if isinstance(twin, torch.optim.Adagrad):
        _fill_adagrad(twin)
    return twin


def _fill_adagrad(twin: torch.optim.Adagrad) -> None:
    """Make the state that Adagrad's constructor makes, and its step expects in torch before 2.13."""
    for group in twin.param_groups:
        for p in group["params"]:
            total = torch.full_like(p, group["initial_accumulator_value"], requires_grad=False)
            twin.state[p] = {"step": torch.tensor(0.0), "sum": total}


def _own(value: Any) -> Any:
    """A container of the twin's own: what it puts there must not reach the original."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value
