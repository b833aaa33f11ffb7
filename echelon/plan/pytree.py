"""Flattening of values into leaves, and back: torch's pytrees, extended by dataclasses and subclasses of dict.

Modules seldom pass a single tensor to each other. Torch's pytree knows tuples, lists, dicts and registered classes; an
unregistered dataclass or dict subclass is a leaf to torch, which hides the tensors inside it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_ALONE = str(tree_flatten(None)[1])


@dataclasses.dataclass(frozen=True)
class FlattenedTree:
    """A flattened value.

    leaves:   leaves in a fixed order
    pattern:  text that identifies the structure without the leaves
    together: rebuilds a value from leaves
    """

    leaves: list[Any]
    pattern: str
    together: Callable[[Iterable[Any]], Any]


def take_apart(value: Any) -> FlattenedTree:
    """Flatten ``value``. ``None`` is a leaf, as for torch."""
    if isinstance(value, Tensor):
        return FlattenedTree([value], _ALONE, _only)
    outer, structure = tree_flatten(value)
    inner = [_open(leaf) for leaf in outer]
    pattern = str(structure) + "".join(f"{at}:{one.pattern}" for at, one in enumerate(inner) if one.pattern)

    def together(leaves: Iterable[Any]) -> Any:
        remaining = iter(leaves)
        return tree_unflatten([one.together(_next(remaining, len(one.leaves))) for one in inner], structure)

    return FlattenedTree([leaf for one in inner for leaf in one.leaves], pattern, together)


def replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return ``value`` with every tensor in it replaced by ``replace(tensor)``."""
    parts = take_apart(value)
    return parts.together(replace(leaf) if isinstance(leaf, Tensor) else leaf for leaf in parts.leaves)


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in ``value``."""
    return [leaf for leaf in take_apart(value).leaves if isinstance(leaf, Tensor)]


def hides_tensors(leaf: Any) -> bool:
    """Return True if an object that cannot be flattened has tensors among its attributes."""
    return not isinstance(leaf, Tensor | type) and hasattr(leaf, "__dict__") and bool(tensors_of(vars(leaf)))


def _open(leaf: Any) -> FlattenedTree:
    """Flatten a dataclass or dict subclass; return any other value as a single leaf."""
    if isinstance(leaf, Tensor | type):
        return _closed(leaf)
    names = [field.name for field in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
    keys = list(leaf) if isinstance(leaf, dict) else []
    if not names and not keys:
        return _closed(leaf)
    # An object like transformers' ModelOutput is both, and has each entry twice: as a field and as an item.
    single = [name for name in names if name not in keys and hasattr(leaf, name)]
    content = take_apart([*(leaf[key] for key in keys), *(getattr(leaf, name) for name in single)])

    def together(leaves: Iterable[Any]) -> Any:
        values = content.together(leaves)
        made = copy.copy(leaf)
        for key, value in zip(keys, values, strict=False):
            dict.__setitem__(made, key, value)
            if key in names:
                object.__setattr__(made, key, value)
        for name, value in zip(single, values[len(keys) :], strict=True):
            object.__setattr__(made, name, value)
        return made

    return FlattenedTree(content.leaves, f"{type(leaf).__qualname__}({keys}{single}{content.pattern})", together)


def _closed(leaf: Any) -> FlattenedTree:
    return FlattenedTree([leaf], "", _only)


def _only(leaves: Iterable[Any]) -> Any:
    return next(iter(leaves))


def _next(remaining: Iterator[Any], count: int) -> list[Any]:
    return [next(remaining) for _ in range(count)]
