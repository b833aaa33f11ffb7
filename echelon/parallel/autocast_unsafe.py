"""Detects operations that torch refuses under autocast on a GPU: binary cross entropy of probabilities."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from echelon.base.code_origin import is_users

#: Part of torch's error message.
REFUSED = "are unsafe to autocast"
REASON = "binary_cross_entropy wants fp32 (binary_cross_entropy_with_logits does not)"

_NAMES = {"binary_cross_entropy", "BCELoss"}
_DEEPEST = 4  # depth of nested calls that is searched


def find_autocast_unsafe(model: nn.Module, loss: Callable[..., Any] | None) -> str | None:
    """Return the reason why model or loss needs fp32, as far as their code shows it; None if there is none."""
    return REASON if _uses(model, 0) or _uses(loss, 0) else None


def _uses(thing: Any, depth: int) -> bool:
    if thing is F.binary_cross_entropy or isinstance(thing, nn.BCELoss):
        return True
    if depth > _DEEPEST:
        return False
    return any(_uses(part, depth + 1) for part in _parts(thing)) or bool(_NAMES.intersection(_names(thing)))


def _parts(thing: Any) -> Iterator[Any]:
    """Yield the functions and modules that ``thing`` calls or may call."""
    if isinstance(thing, nn.Module):
        kinds = {type(module): module for module in thing.modules()}
        yield from (module for module in kinds.values() if isinstance(module, nn.BCELoss))
        yield from (getattr(kind, "forward", None) for kind in kinds)
    elif isinstance(thing, functools.partial):
        yield thing.func
    elif isinstance(thing, types.MethodType):
        yield thing.__func__
    elif _is_users_function(thing):
        values = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        values += [_content(cell) for cell in thing.__closure__ or ()]
        yield from (value for value in values if isinstance(value, types.FunctionType | nn.BCELoss))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _names(thing: Any) -> tuple[str, ...]:
    return thing.__code__.co_names if _is_users_function(thing) else ()


def _is_users_function(thing: Any) -> bool:
    return isinstance(thing, types.FunctionType) and is_users(thing.__code__.co_filename)
