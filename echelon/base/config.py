"""Configuration as frozen dataclasses that refuse unknown names.

A misspelt field or a value of the wrong type is a one-line error at construction, not a surprise at step 40. ``build``
reads values from JSON or YAML under the same rules.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, dataclass_transform

from echelon.base.errors import UsageError, nearest
from echelon.base.formatting import brief

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
        given = _in_our_names(made, given, cls.__name__)
        _check_names(made, given, cls.__name__)
        for name, value in given.items():
            if isinstance(value, dict | list):  # nested settings and tuples, as JSON and YAML files have them
                given[name] = _typed(_hint(made, name), value, f"{cls.__name__}.{name}")
        _check_types(made, given, cls.__name__)
        plain_init(self, **given)

    made.__init__ = __init__  # type: ignore[method-assign]
    made.__setattr__ = _refuse_change  # type: ignore[method-assign]
    return made


def _refuse_change(self: Any, name: str, value: Any) -> None:
    """Raise an error that shows the constructor call to write instead of the assignment."""
    made = f"{type(self).__name__}({name}={brief(value, 100)}, ...)"
    raise FrozenOptionError(
        f"a {type(self).__name__} cannot be changed after it is made; give all options at once: {made}"
    )


class FrozenOptionError(UsageError, AttributeError):
    """An option of a frozen object was set after construction."""


def _in_our_names(kind: Any, given: Mapping[Any, Any], label: str) -> Any:
    """Translate names of other frameworks, if the class has a static method ``in_our_names``."""
    translate = getattr(kind, "in_our_names", None)
    return given if translate is None else translate(given, label)


def build(kind: type[T], plain: Any, path: str = "") -> T:
    """Build a strict dataclass from JSON or YAML values: dicts become nested classes, lists tuples, as its types say.

    Names, types and sizes are checked as by the constructor; ``path`` names the place in errors. A float may be
    text, because YAML reads ``1e-3`` (no dot) as text.
    """
    path = path or kind.__name__
    if not isinstance(plain, Mapping):
        raise UsageError(f"{path}: expected options by name, got {brief(plain, 100)}")
    plain = _in_our_names(kind, plain, path)
    _check_names(kind, plain, path)
    values = {name: _typed(_hint(kind, name), value, f"{path}.{name}") for name, value in plain.items()}
    _check_types(kind, values, path)
    try:
        return kind(**values)
    except UsageError as error:  # right names and types, wrong size: the message names the class, not yet the path
        raise UsageError(str(error).replace(f"{kind.__name__}(", f"{path}(", 1)) from None


def _typed(kind: Any, plain: Any, path: str) -> Any:
    """Convert ``plain`` to ``kind`` if possible; otherwise return it unchanged, so that the type check reports it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if fits(plain, kind):
        return plain
    if origin in (Union, types.UnionType):
        return _typed_as_one_of(inner, plain, path)
    if isinstance(plain, Mapping) and _is_strict(kind):
        return build(kind, plain, path)
    if origin is tuple and isinstance(plain, list | tuple):
        kinds = _kinds(inner, len(plain))
        typed = [_typed(each, item, f"{path}[{i}]") for i, (each, item) in enumerate(zip(kinds, plain, strict=False))]
        return tuple(typed) if len(kinds) == len(plain) else plain
    if origin is dict and isinstance(plain, Mapping):
        return {key: _typed(inner[1], value, f"{path}.{key}") for key, value in plain.items()}
    if kind is float and isinstance(plain, str):
        return _number(plain)
    return plain


def _typed_as_one_of(options: tuple[Any, ...], plain: Any, path: str) -> Any:
    if isinstance(plain, Mapping):  # try the class with the most of these names first
        parts = [option for option in options if _is_strict(option)]
        parts.sort(key=lambda part: -len(set(plain) & _names(part)))
        options = (*parts, *options)
    for option in options:
        made = _typed(option, plain, path)
        if fits(made, option):
            return made
    return plain


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _kinds(inner: tuple[Any, ...], count: int) -> list[Any]:
    """Return the type of each of ``count`` items, for ``tuple[X, ...]`` and ``tuple[X, Y]`` alike."""
    return [inner[0]] * count if inner[-1:] == (Ellipsis,) else list(inner)


def _check_names(kind: type[Any], given: Mapping[Any, Any], label: str) -> None:
    for name in given:
        if name not in _names(kind):
            raise UsageError(f"{label} has no option '{name}'{nearest(str(name), _names(kind))}")
    for field in dataclasses.fields(kind):
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{label} needs the option '{field.name}'")


def _check_types(kind: type[Any], given: Mapping[str, Any], label: str) -> None:
    for name, value in given.items():
        if not fits(value, _hint(kind, name)):
            raise UsageError(f"{label}({name}={brief(value, 100)}): expected {describe(_hint(kind, name))}")


def _hint(kind: Any, name: str) -> Any:
    return _hints(kind)[name]


_hints = functools.cache(typing.get_type_hints)  # cached: a plan has a thousand parameters of one class


def _is_strict(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def fits(value: Any, kind: Any) -> bool:
    """Return True if ``value`` is of the annotated ``kind``. An int passes as a float, a bool not as an int."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner and type(value) in {type(option) for option in inner}
    if origin is tuple:
        if not isinstance(value, tuple) or len(value) != len(_kinds(inner, len(value))):
            return False
        if inner[-1:] == (Ellipsis,) and set(map(type, value)) <= {inner[0]}:  # fast path for thousands of floats
            return True
        return all(map(fits, value, _kinds(inner, len(value))))
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def describe(kind: Any) -> str:
    """Return the annotation as text for a message: ``'fp16', 'bf16' or None``."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Literal, Union, types.UnionType):
        return _either(_choices(kind))
    if kind is type(None):
        return "None"
    if origin is Callable:
        return "a function"
    if origin is tuple and inner[-1:] == (Ellipsis,):
        return f"tuple of {describe(inner[0])}"
    return getattr(kind, "__name__", str(kind)) if origin is None else str(kind)


def _choices(kind: Any) -> list[str]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return [repr(option) for option in inner]
    if origin in (Union, types.UnionType):
        return [choice for option in inner for choice in _choices(option)]
    return [describe(kind)]


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def require(holds: bool, owner: object, name: str, wanted: str) -> None:
    """Raise if a value has the right type but not the right size; for ``__post_init__`` of a strict class."""
    if not holds:
        raise UsageError(f"{type(owner).__name__}({name}={brief(getattr(owner, name), 100)}): expected {wanted}")
