"""Copy an optimizer: same class and settings, other parameters, so that the effect of its step can be tested."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: Options that select the plain for-loop implementation, which runs on any device.
PLAIN: dict[str, Any] = {"foreach": False, "fused": None, "capturable": False}


def copy_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    twins: dict[int, torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings for ``groups``, without state and hooks.

    twins: the copies by the id of the original; also those of optimizers inside the optimizer (SAM, Lookahead)
    """
    twins = {} if twins is None else twins
    if id(optimizer) in twins:
        return twins[id(optimizer)]
    twin = twins[id(optimizer)] = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # A scheduler sets a `step` on the instance that steps the original. The copy uses the method of its class.
        if not (callable(value) and callable(getattr(type(optimizer), name, None))):
            inner = isinstance(value, torch.optim.Optimizer)
            twin.__dict__[name] = copy_optimizer(value, groups, twins) if inner else _own(value)
    twin.__dict__.update({name: OrderedDict() for name in _HOOKS})  # a user's hook expects the user's optimizer
    twin.__dict__.update(state=defaultdict(dict), param_groups=groups)
    if isinstance(twin, torch.optim.Adagrad):
        _fill_adagrad(twin)
    return twin


def _fill_adagrad(twin: torch.optim.Adagrad) -> None:
    """Create the state that Adagrad's constructor creates and that its step expects in torch before 2.13."""
    for group in twin.param_groups:
        for p in group["params"]:
            total = torch.full_like(p, group["initial_accumulator_value"], requires_grad=False)
            twin.state[p] = {"step": torch.tensor(0.0), "sum": total}


def _own(value: Any) -> Any:
    """Return a shallow copy of a container, so that the copied optimizer does not modify the original's."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value
