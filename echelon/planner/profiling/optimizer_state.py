"""Exact bytes of optimizer state: the optimizer itself takes a step on meta tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.base.errors import UsageError
from echelon.optim.optimizer_copy import PLAIN, copy_optimizer
from echelon.planner.cost.system import STATE, System

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
Owners = Mapping[int, tuple[torch.optim.Optimizer, dict[str, Any]]]
Known = dict[Any, list[Tensor]]  # cache of a parameter's optimizer state, by optimizer, group, shape and dtype


def optimizer_name(given: Given) -> str:
    """Return the optimizer's name in the cost model: ``adamw``, ``momentum``; with several optimizers, the first's."""
    first = _listed(given)[0]
    name = type(first).__name__.lower()
    return "momentum" if name == "sgd" and any(group.get("momentum") for group in first.param_groups) else name


def with_state_of(system: System, given: Given, model: nn.Module) -> System:
    """Return ``system`` with the state bytes of these optimizers for the model, under ``optimizer_name``."""
    return replace(system, state={**system.state, optimizer_name(given): bytes_an_entry(given, model)})


def bytes_an_entry(given: Given, model: nn.Module) -> float:
    """Return the bytes of state per trained entry; scalars such as a step count are not counted."""
    owned, known = owners(given), Known()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    entries = sum(parameter.numel() for parameter in trained)
    kept = [
        sum(map(_size, (each for each in kept_after_step(*owned[id(one)], one.shape, one.dtype, known) if each.dim())))
        for one in trained
        if id(one) in owned
    ]
    return sum(kept) / max(entries, 1)


def owners(given: Given) -> Owners:
    """Return, by id of a parameter, its optimizer and its parameter group."""
    return {id(p): (each, group) for each in _listed(given) for group in each.param_groups for p in group["params"]}


def state_bytes(owned: Owners, parameter: nn.Parameter, shape: Sequence[int], known: Known) -> int:
    """Return the bytes of state for a part of a parameter; 0 if no optimizer has the parameter.

    shape: shape of the part
    known: cache of former results, which is updated
    """
    if id(parameter) not in owned:
        return 0
    optimizer, group = owned[id(parameter)]
    if parameter.requires_grad:
        return sum(map(_size, kept_after_step(optimizer, group, shape, parameter.dtype, known)))
    # The parameter is never stepped, but some optimizers allocate state in their constructor.
    kept = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
    entries = [math.prod(shape) if value.shape == parameter.shape else value.numel() for value in kept]
    return sum(count * value.element_size() for count, value in zip(entries, kept, strict=True))


def kept_after_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: Sequence[int], dtype: torch.dtype, known: Known
) -> list[Tensor]:
    """Return the state after a step for a parameter of this shape, as meta tensors."""
    key = (id(optimizer), id(group), tuple(shape), dtype)
    if key not in known:
        known[key] = _stepped(optimizer, group, torch.empty(tuple(shape), dtype=dtype, device="meta"))
    return known[key]


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], value: Tensor) -> list[Tensor]:
    try:
        return _state_after(optimizer, group, value)
    except Exception as error:  # third-party optimizers may raise anything
        if value.numel() > MOST:
            return _from_table(optimizer, value, error)
    try:  # an optimizer that reads values needs a real tensor
        return _state_after(optimizer, group, torch.zeros(value.shape, dtype=value.dtype))
    except Exception as error:
        return _from_table(optimizer, value, error)


def _state_after(optimizer: torch.optim.Optimizer, group: dict[str, Any], value: Tensor) -> list[Tensor]:
    """Return the state of a copy of the optimizer after a step, for a parameter like ``value``."""
    stand_in = nn.Parameter(value)
    stand_in.grad = torch.zeros_like(stand_in)
    plain = {name: way for name, way in PLAIN.items() if name in group}
    twins: dict[int, torch.optim.Optimizer] = {}
    copy_optimizer(optimizer, [{**group, **plain, "params": [stand_in]}], twins).step()
    kept = tree_leaves([twin.state.get(stand_in, {}) for twin in twins.values()])
    return [value.to("meta") for value in kept if isinstance(value, Tensor)]


#: Largest number of entries of a real tensor that is made for an optimizer that cannot step on meta tensors.
MOST = 2**26


def _from_table(optimizer: torch.optim.Optimizer, parameter: Tensor, error: Exception) -> list[Tensor]:
    """Return state from the STATE table, for an optimizer that cannot step on meta tensors.

    Raises UsageError if the table does not have the optimizer's name.
    """
    name = type(optimizer).__name__.lower()
    if name not in STATE:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"{type(optimizer).__name__} does not step on meta tensors ({type(error).__name__}: {reason}), so the "
            "size of "
            "its state is unknown; give --optimizer with one that has as much state"
        ) from error
    return [torch.empty(int(STATE[name] * parameter.numel()), dtype=torch.uint8, device="meta")]


def _size(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _listed(given: Given) -> list[torch.optim.Optimizer]:
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    return list(given.values()) if isinstance(given, Mapping) else list(given)
