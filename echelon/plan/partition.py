"""Automatic partition of a model into pipeline stages: finds the units and balances them over the stages.

The cost of a unit is its number of operations if a batch is given, counted with fake tensors, and otherwise its number
of parameters. Operations between units count for the unit after them, whose stage runs them; operations after the last
unit count for the last unit.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.plan.called_modules import is_called
from echelon.plan.fake_forward import fake_forward, placeholder, side_effect_free
from echelon.plan.module_calls import install_call_hooks, intercept_module_calls
from echelon.plan.operations import OperationMode, tensors_in
from echelon.plan.pytree import replace_tensors
from echelon.plan.segments import CONTAINERS, _blocks, _children, _kind


def find_units(model: nn.Module) -> list[str]:
    """Return the names of modules between which the model may be cut, in the order of registration.

    Units are blocks, and the other modules that run in the containers of blocks.
    """
    return list(_units(model, "", leaves_in=(nn.Sequential,))) or list(_units(model, "", leaves_in=CONTAINERS))


def _units(module: nn.Module, prefix: str, leaves_in: tuple[type[nn.Module], ...]) -> Iterator[str]:
    children = list(_children(module, prefix))
    repeated = Counter(_kind(child) for _, child in children)
    for name, child in children:
        may_be_one = isinstance(module, leaves_in) or (isinstance(module, CONTAINERS) and any(child.children()))
        if may_be_one and is_called(child) and not _holds_units(child, f"{name}.", repeated[_kind(child)] > 1):
            yield name
        else:
            yield from _units(child, f"{name}.", leaves_in)


def _holds_units(child: nn.Module, prefix: str, repeated: bool) -> bool:
    """Return True if the units are inside ``child``: a container of blocks, or an unrepeated module with blocks."""
    if isinstance(child, CONTAINERS):
        return any(any(inner.children()) for inner in child.children())
    return not repeated and any(_blocks(child, prefix))


def balance_stages(
    model: nn.Module,
    stages: int,
    call: Callable[[Any], Any] | None = None,
    batch: Any = None,
    weights: tuple[float, ...] | None = None,
) -> dict[str, int]:
    """Assign units to stages in order, so that the slowest stage is as fast as possible.

    Raises ``UsageError`` if there are fewer units than stages.

    call:    runs the forward and the loss on a batch; default None: costs are parameter counts
    batch:   batch to count operations with; default None: costs are parameter counts
    weights: relative speeds of the stages' devices; default None: equal
    """
    if weights is not None and len(weights) != stages:
        raise UsageError(f"{stages} stages, but weights for {len(weights)}; give one for each")
    units = find_units(model)
    if call is not None and batch is not None:
        costs = count_operations(model, call, batch, units)
    else:
        costs = [([name], cost) for name, cost in zip(units, _parameter_counts(model, units), strict=True)]
    if len(costs) < stages:
        some = ", ".join([names[0] for names, _ in costs[:4]] + ["..."] * (len(costs) > 4))
        named = f" ({some})" if costs else ""
        raise UsageError(
            f"{stages} stages were requested, but only {len(costs)} modules run one after another{named}; request "
            "fewer stages, or mark the modules of each with stage()"
        )
    ends = _share_out([cost for _, cost in costs], weights or (1.0,) * stages)
    firsts = [0, *ends[:-1]]
    return {
        name: stage
        for stage, (first, end) in enumerate(zip(firsts, ends, strict=True))
        for names, _ in costs[first:end]
        for name in names
    }


def _share_out(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return the end of each stage: contiguous, none empty, with the smallest possible maximum of cost/speed."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    best = [0.0, *[math.inf] * count]  # best[i]: smallest maximum for the first i units on the stages so far
    choices: list[list[int]] = []
    for speed in speeds:
        reached, choice = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for first in range(end):
                slowest = max(best[first], (total[end] - total[first]) / speed)
                if slowest < reached[end]:
                    reached[end], choice[end] = slowest, first
        best = reached
        choices.append(choice)
    ends = [count]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return ends[-2::-1]


def _parameter_counts(model: nn.Module, units: Sequence[str]) -> list[float]:
    """Return the number of parameters of each unit; other parameters count for the unit after them, or for the last."""
    at = {name: place for place, name in enumerate(units)}
    counts = [0.0] * len(units)
    place = 0
    for name, value in model.named_parameters():
        inside = next((at[prefix] for prefix in _prefixes(name) if prefix in at), None)
        if inside is not None:
            place = min(inside + 1, len(units) - 1)
        if counts:
            counts[place if inside is None else inside] += value.numel()
    return counts


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


# ---- counting arithmetic ----


def count_operations(
    model: nn.Module, call: Callable[[Any], Any], batch: Any, units: Sequence[str]
) -> list[tuple[list[str], float]]:
    """Return groups of units in the order of their calls, with the number of operations of each group.

    If a unit is called several times, the units between its first and its last call are in one group.
    """
    undo = install_call_hooks(model, units)
    try:
        with side_effect_free(model, batch) as copied:
            counted = _UnitCostCounter()
            with counted.outside, intercept_module_calls(counted.unit_called):
                call(copied)
    finally:
        undo()
    return counted.groups()


class _UnitCostCounter:
    def __init__(self) -> None:
        self.outside = _Operations()
        self._spent = 0.0
        self._calls: list[tuple[str, float]] = []

    def unit_called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside: list[_Operations] = []

        def count() -> _Operations:
            inside.append(_Operations())
            return inside[-1]

        output = fake_forward(module, args, kwargs, count)
        self._calls.append((name, inside[-1].total + self.outside.total - self._spent))
        self._spent = self.outside.total
        return replace_tensors(output, placeholder)

    def groups(self) -> list[tuple[list[str], float]]:
        last = {name: at for at, (name, _) in enumerate(self._calls)}
        result: list[tuple[list[str], float]] = []
        until = -1
        for at, (name, cost) in enumerate(self._calls):
            if at > until:
                result.append(([], 0.0))
            until = max(until, last[name])
            names, total = result[-1]
            result[-1] = (names if name in names else [*names, name], total + cost)
        if result:
            result[-1] = (result[-1][0], result[-1][1] + self.outside.total - self._spent)
        return result


class _Operations(OperationMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs; an operation without a FLOP formula counts one for each element of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        rule = _rules().get(func.overloadpacket)
        if rule is not None:
            self.total += rule(*args, **kwargs, out_val=result)
        elif not func.is_view:
            self.total += sum(tensor.numel() for tensor in tensors_in(result))
        return result


@functools.cache
def _rules() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    return {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention, **flop_registry}


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of CPU flash attention, which torch's FLOP counter does not know: two matrix products."""
    return 2 * query.numel() * key.shape[-2] + 2 * query.shape[:-1].numel() * key.shape[-2] * value.shape[-1]
