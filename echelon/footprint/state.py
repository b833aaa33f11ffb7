"""Bytes of optimizer state, exactly: the optimizer itself takes a step on tensors that have shapes and no contents."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def named_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One that is only asked for its state."""
    kind, options = check_name(name)
    return kind(parameters, **options)


def check_name(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """What makes the optimizer of this name."""
    from echelon.optim import LAMB, LARS

    known: dict[str, tuple[Any, dict[str, Any]]] = {**NAMED, "lars": (LARS, {"lr": 0.1}), "lamb": (LAMB, {"lr": 0.1})}
    if name not in known:
        raise UsageError(f"--optimizer has no '{name}'{nearest(name, known)}: use one of {', '.join(known)}")
    return known[name]


def lean_bytes(shape: Sequence[int]) -> int:
    """Remainder and moments of a lean parameter."""
    from echelon.lean.places import on_device

    kept = on_device(torch.empty(tuple(shape), dtype=torch.bfloat16, device="meta"))
    return sum(_size(value) for value in kept.tensors())


Owners = Mapping[int, tuple[torch.optim.Optimizer, dict[str, Any]]]


def owners(given: Given) -> Owners:
    """By a parameter's id, the optimizer that has it, and in which of its groups."""
    return {id(p): (each, group) for each in _listed(given) for group in each.param_groups for p in group["params"]}


def state_bytes(owned: Owners, parameter: nn.Parameter, shape: Sequence[int], known: dict[Any, int]) -> int:
    """Of such a part of one parameter; 0 where no optimizer has it. ``known``: what was found before."""
    if id(parameter) not in owned:
        return 0
    optimizer, group = owned[id(parameter)]
    if parameter.requires_grad:
        return bytes_of_step(optimizer, group, shape, parameter.dtype, known)
    # never stepped; yet some optimizers keep something from the start
    kept = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
    entries = [math.prod(shape) if value.shape == parameter.shape else value.numel() for value in kept]
    return sum(count * value.element_size() for count, value in zip(entries, kept, strict=True))


def bytes_of_step(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    known: dict[Any, int],
) -> int:
    """What it keeps for a parameter of such a shape after a step."""
    key = (id(optimizer), id(group), tuple(shape), dtype)
    if key not in known:
        known[key] = _stepped(optimizer, group, torch.empty(tuple(shape), dtype=dtype, device="meta"))
    return known[key]


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], value: Tensor) -> int:
    try:
        return _state_after(optimizer, group, value)
    except Exception as error:  # whatever an optimizer of somebody else's may raise
        if value.numel() > MOST:
            return _from_table(optimizer, value, error)
    try:  # one that looks at values is given some
        return _state_after(optimizer, group, torch.zeros(value.shape, dtype=value.dtype))
    except Exception as error:
        return _from_table(optimizer, value, error)


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
