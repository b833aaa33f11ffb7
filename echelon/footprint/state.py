"""Bytes of optimizer state, exactly: the optimizer itself takes a step on tensors that have shapes and no contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UsageError, nearest
from echelon.planner.cost.system import STATE

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]

#: Those that a command line may name.
NAMED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def named_optimizer(name: str) -> torch.optim.Optimizer:
    """One that is only asked for its state."""
    from echelon.optim import LAMB, LARS

    known: dict[str, tuple[Any, dict[str, Any]]] = {**NAMED, "lars": (LARS, {"lr": 0.1}), "lamb": (LAMB, {"lr": 0.1})}
    if name not in known:
        raise UsageError(f"--optimizer has no '{name}'{nearest(name, known)}: use one of {', '.join(known)}")
    kind, options = known[name]
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.empty(0, device="meta"))], **options)
    return made


def state_bytes(given: Given, parameter: nn.Parameter, known: dict[Any, int]) -> int:
    """Of one parameter, by the optimizer that has it; 0 where none has. ``known``: what was found before."""
    if not parameter.requires_grad:  # never stepped; yet some optimizers keep something from the start
        return sum(_size(value) for each in _listed(given) for value in each.state.get(parameter, {}).values())
    for optimizer in _listed(given):
        for group in optimizer.param_groups:
            if any(own is parameter for own in group["params"]):
                return bytes_of_step(optimizer, group, parameter, known)
    return 0


def bytes_of_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, known: dict[Any, int]
) -> int:
    """What it keeps for a parameter of such a shape after a step."""
    key = (id(optimizer), id(group), tuple(parameter.shape), parameter.dtype)
    if key not in known:
        known[key] = _stepped(optimizer, group, parameter)
    return known[key]


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    try:
        return _state_after(optimizer, group, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    except Exception as error:  # whatever an optimizer of somebody else's may raise
        if parameter.numel() > MOST:
            return _from_table(optimizer, parameter, error)
    try:  # one that looks at values is given some
        return _state_after(optimizer, group, torch.zeros(parameter.shape, dtype=parameter.dtype))
    except Exception as error:
        return _from_table(optimizer, parameter, error)


def _state_after(optimizer: torch.optim.Optimizer, group: dict[str, Any], value: Tensor) -> int:
    """A twin of the optimizer, with its settings and without its state, steps for this one."""
    stand_in = nn.Parameter(value)
    stand_in.grad = torch.zeros_like(stand_in)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    plain = {name: way for name, way in _PLAIN.items() if name in group}
    twin.state, twin.param_groups = defaultdict(dict), [{**group, **plain, "params": [stand_in]}]
    twin.step()
    return sum(_size(kept) for kept in twin.state[stand_in].values())


#: Entries of a parameter that is made for it, where an optimizer does not step without contents.
MOST = 2**26
#: Ways to step that want a device.
_PLAIN: dict[str, Any] = {"foreach": False, "fused": None, "capturable": False}


def _from_table(optimizer: torch.optim.Optimizer, parameter: Tensor, error: Exception) -> int:
    """An optimizer that does not step without contents: by its name, as plans count it."""
    name = type(optimizer).__name__.lower()
    if name not in STATE:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"{type(optimizer).__name__} does not step without contents ({type(error).__name__}: {reason}), so its "
            "state is not known; give --optimizer with one that keeps as much"
        ) from error
    return int(STATE[name] * parameter.numel())


def _size(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _listed(given: Given) -> list[torch.optim.Optimizer]:
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    return list(given.values()) if isinstance(given, Mapping) else list(given)
