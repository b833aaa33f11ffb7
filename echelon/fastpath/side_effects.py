"""Detects side effects that a CUDA graph would not replay: attributes that forward sets on modules."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from echelon.fastpath.module_structure import PLAIN, REGISTERS, is_nan, place_of

Look = dict[tuple[str, str], Any]


def snapshot_attributes(model: nn.Module) -> Look:
    """Return all attributes of all modules in comparable form: values, and addresses and shapes of tensors."""
    return {
        (name, attribute): _look(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }


def find_side_effect(before: Look, after: Look) -> str | None:
    """Return the full name of the first attribute that differs, or None."""
    for at in [*after, *before]:
        if before.get(at, _ABSENT) != after.get(at, _ABSENT):
            module, attribute = at
            both = before.get(at, {}), after.get(at, {})
            changed = _entry(*both) if attribute in REGISTERS else attribute
            return f"{module}.{changed}" if module else str(changed)
    return None


_ABSENT = object()
_DEEPEST = 6


def _look(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return "tensor", place_of(value), tuple(value.shape)
    if isinstance(value, PLAIN):
        return "not a number" if is_nan(value) else value
    if depth == _DEEPEST:
        return id(value)
    if isinstance(value, dict):
        return {key: _look(each, depth + 1) for key, each in dict.items(value)}
    if isinstance(value, list | tuple | deque):
        return [_look(each, depth + 1) for each in value]
    return id(value)


def _entry(before: dict[str, Any], after: dict[str, Any]) -> str:
    return next(name for name in [*after, *before] if before.get(name, _ABSENT) != after.get(name, _ABSENT))
