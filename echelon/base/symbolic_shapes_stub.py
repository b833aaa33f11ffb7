"""Stand-ins for torch's symbolic shapes, and for sympy below them, while fake tensors have sizes that are numbers.

Torch asks its symbolic shapes about every size, also about plain numbers, for which the answers are those below. Their
modules cost 1.6 s of CPU to load (torch 2.13), as much as the profile of a BERT. Others get the modules themselves.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from echelon.base.module_stub import ModuleStub

_NAME = "torch.fx.experimental.symbolic_shapes"
#: Modules that torch imports in functions, for a class that plain numbers do not need.
_EMPTY = {"sympy": "Basic", "torch.utils._sympy.functions": "Max"}
_ERROR = "GuardOnDataDependentSymNode"


def _itself(value: Any, *_: object, **__: object) -> Any:
    """Return a number or truth value, which needs no symbol to be known."""
    return value


def _equal(x: Any, y: Any) -> bool:
    """Return True if two numbers, or two sequences of numbers, are equal."""
    if isinstance(x, tuple | list) and isinstance(y, tuple | list):
        return len(x) == len(y) and all(map(_equal, x, y))
    return bool(x == y)


def _empty(*_: object) -> tuple[()]:
    """Return no symbols."""
    return ()


#: By name: the result of a function of the module if no argument has a symbol in it.
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("guard_or_true", "guard_or_false", "statically_known_true", "guard_size_oblivious"), _itself),
    **dict.fromkeys(("expect_true", "guard_int", "guarding_hint_or_throw"), _itself),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "has_free_unbacked_symbols": lambda _: False,
    "sym_eq": _equal,
    "sym_and": lambda *values: functools.reduce(operator.and_, values),
    "sym_or": lambda *values: functools.reduce(operator.or_, values),
    "free_unbacked_symbols": _empty,
    "_iterate_exprs": _empty,
    "_iterate_nodes": _empty,
    "compute_unbacked_bindings": lambda *_: None,
}


def _is_plain(value: Any) -> bool:
    """Return True if there is no symbol in the value; sizes of fake tensors have some only with a ``ShapeEnv``."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return value.layout is not torch.jagged and _is_plain(tuple(value.shape))
    return value is None or isinstance(value, bool | int | float | str)


class _EmptyStub(ModuleStub):
    """A module without contents, but for a class of expressions: nothing is one, and nothing makes one.

    expression: name of the class
    """

    def __init__(self, name: str, expression: str) -> None:
        super().__init__(name)
        self._expression = expression

    def __getattr__(self, name: str) -> Any:
        return _Expression if name == self._expression and self.stands else super().__getattr__(name)


class _Expression:
    """A symbolic expression, of which there is none."""


class _ShapesStub(ModuleStub):
    def __init__(self, below: Iterable[ModuleStub]) -> None:
        super().__init__(_NAME)
        self._below = tuple(below)
        self.error = type(_ERROR, (RuntimeError,), {})  # nothing raises it: no size depends on data without symbols
        for name, rule in _RULES.items():
            vars(self)[name] = functools.partial(self._answer, name, rule)

    def __getattr__(self, name: str) -> Any:
        return self.error if name == _ERROR and self.stands else super().__getattr__(name)

    def _answer(self, name: str, rule: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.stands and _is_plain(args):
            return rule(*args)
        return getattr(self.real(), name)(*args, **options)  # a module that was imported within keeps this function

    def leave(self) -> None:
        """Remove the stand-ins."""
        was_there = self.stands
        super().leave()
        for stub in self._below:
            stub.leave()
        holders = [each for each in list(sys.modules.values()) if _error_of(each) is self.error] if was_there else []
        if holders:
            sys.meta_path.insert(0, _ErrorExchange(holders))


def _error_of(module: object) -> object:
    return getattr(module, "__dict__", {}).get(_ERROR)


class _ErrorExchange:
    """An import hook that gives modules the error of the real module as soon as that module is imported.

    DTensor, which is imported by the first operation on fake tensors that python decomposes, catches it by name.
    """

    def __init__(self, holders: Iterable[object]) -> None:
        self._holders = tuple(holders)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _NAME else None
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = functools.partial(self._executed, spec.loader.exec_module)
        return spec

    def _executed(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        sys.meta_path.remove(self)
        for holder in self._holders:
            setattr(holder, _ERROR, getattr(module, _ERROR))


@contextlib.contextmanager
def without_symbolic_shapes() -> Iterator[None]:
    """Keep torch from importing its symbolic shapes within the context, unless they have been imported.

    Only for fake tensors whose sizes are numbers, and for code that compiles nothing.
    """
    if not ModuleStub.can_stand_for(_NAME):
        yield
        return
    below = [_EmptyStub(name, expression) for name, expression in _EMPTY.items() if ModuleStub.can_stand_for(name)]
    shapes = _ShapesStub(below)
    for stub in (*below, shapes):
        stub.enter()
    try:
        yield
    finally:
        shapes.leave()
