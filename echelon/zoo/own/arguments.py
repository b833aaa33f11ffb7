"""Turn the arguments of a user's class or function into parameters of the command, with their types and defaults."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from echelon.base.errors import UsageError
from echelon.zoo.entry import Request, Setting
from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.train_arguments import STRATEGY_OPTIONS

_COMMON = {parameter.name: parameter for parameter in PARAMETERS}

#: Common parameters that a user's class may take as arguments. The others belong to the run: an argument 'stages' of a
#: network must not partition it into pipeline stages.
_GIVEN = {"seed", "task_type", "batch_size"} | {
    parameter.name for parameter in PARAMETERS if parameter.group in ("dataset", "input", "restore")
}

_PLAIN = (bool, int, float, str)
_LISTS = (list, tuple)


@dataclass(frozen=True)
class OwnArguments:
    """The arguments of a user's class or function that a run can set.

    make:     the class or function
    names:    names of the arguments
    settings: arguments that are not common parameters
    defaults: default values of common parameters
    """

    make: Callable[..., Any]
    names: tuple[str, ...]
    settings: tuple[Setting, ...]
    defaults: Mapping[str, Any]

    def call(self, request: Request, **more: Any) -> Any:
        """Call the class or function with the values of the run."""
        tuples = {setting.name for setting in self.settings if isinstance(setting.default, tuple)}
        values = {name: request[name] for name in self.names}
        return self.make(**{name: tuple(v) if name in tuples else v for name, v in values.items()}, **more)


def read_arguments(make: Callable[..., Any], place: str, besides: Collection[str] = ()) -> OwnArguments:
    """Read the signature; ``besides`` has the names of arguments to skip."""
    hints, names, settings, defaults = _hints(make), [], [], {}
    for argument in _arguments(make, place):
        name = argument.name
        if name in besides:
            continue
        has_default = argument.default is not argument.empty
        if name in _GIVEN:
            if has_default and argument.default is not None:
                defaults[name] = argument.default
        elif name in _COMMON or name in STRATEGY_OPTIONS or name == "config":
            raise UsageError(
                f"{place}: its argument '{name}' has the name of --{name}, which is the run's own; rename it"
            )
        else:
            kind = _kind(hints.get(name), argument.default if has_default else None)
            if kind is None and has_default:
                continue  # no text can give such a value, for example an activation function
            default = argument.default if has_default else None
            meaning = f"of {place}"
            settings.append(
                Setting(name=name, default=default, meaning=meaning, kind=kind or Any, required=not has_default)
            )
        names.append(name)
    return OwnArguments(make, tuple(names), tuple(settings), defaults)


def _arguments(make: Callable[..., Any], place: str) -> list[inspect.Parameter]:
    try:
        result = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"{place}: its arguments cannot be read; write a function around it") from None
    unnamed = [one.name for one in result if one.kind is one.POSITIONAL_ONLY and one.default is one.empty]
    if unnamed:
        raise UsageError(f"{place}: its argument '{unnamed[0]}' has no name that a caller can use; give it one")
    return [one for one in result if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    except Exception:  # an annotation that only a type checker can resolve
        return {}


def _kind(hint: Any, default: Any) -> Any:
    """Return the type as which text is parsed; None if no text can give a value."""
    if hint is not None and _is_plain(hint):
        return hint
    if (typing.get_origin(hint) or hint) in _LISTS or isinstance(default, _LISTS):
        return list
    if isinstance(default, _PLAIN):
        return type(default)
    return Any if default is None else None


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return all(each is type(None) or _is_plain(each) for each in typing.get_args(hint))
    return hint in _PLAIN or typing.get_origin(hint) is Literal
