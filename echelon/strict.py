"""Configuration as frozen dataclasses that refuse what they do not know.

A misspelt field or a value of the wrong type is a one-line error at construction, not a surprise at step 40.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, dataclass_transform

from echelon.errors import UsageError, nearest

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def strict(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only dataclass whose constructor checks names and types."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    plain_init: Callable[..., None] = made.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if args:
            raise UsageError(f"{cls.__name__}(...) takes named options only, got {args[0]!r} without a name")
        names = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type]
        for name in given:
            if name not in names:
                raise UsageError(f"{cls.__name__} has no option '{name}'{nearest(name, names)}")
        hints = typing.get_type_hints(made)
        for name, value in given.items():
            if not fits(value, hints[name]):
                raise UsageError(f"{cls.__name__}({name}={value!r}): expected {describe(hints[name])}")
        try:
            plain_init(self, **given)
        except TypeError as error:
            raise UsageError(f"{cls.__name__}: {str(error).replace('__init__() ', '')}") from None

    made.__init__ = __init__  # type: ignore[method-assign]
    return made


def fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of the annotated ``kind``. An int is a fine float; a bool is not a fine int."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner and type(value) in {type(option) for option in inner}
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def describe(kind: Any) -> str:
    """The annotation in words: ``'fp16', 'bf16' or None``."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _either([repr(option) for option in inner])
    if origin in (Union, types.UnionType):
        return _either([describe(option) for option in inner])
    if kind is type(None):
        return "None"
    return getattr(kind, "__name__", str(kind)) if origin is None else str(kind)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def require(holds: bool, owner: object, name: str, wanted: str) -> None:
    """Refuse a value that has the right type but not the right size; for ``__post_init__`` of a strict class."""
    if not holds:
        raise UsageError(f"{type(owner).__name__}({name}={getattr(owner, name)!r}): expected {wanted}")
