"""Delays the import of ``torch._dynamo`` by optimizers until something needs it.

Torch hides some of its functions from torch.compile, and imports all of torch._dynamo at the first call of any of them:
the constructor of every optimizer is one. The import takes 1.1 s of CPU in every process (torch 2.13), which is wasted
if nothing is compiled: a tracer that has not been imported cannot be tracing. Until torch._dynamo is imported, these
functions are called directly; the import hook restores torch's own versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_TRACER = "torch._dynamo"
_CACHE = "__dynamo_disable"  # the attribute in which torch caches a function's hidden form, and looks for it first


def hide_from_dynamo(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that torch.compile does not trace."""
    return _plain_for_now(_disable_dynamo(function))


def _plain_for_now(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Cache the plain function as the hidden form of a result of ``_disable_dynamo``."""
    plain = getattr(function, "__wrapped__", None)
    code = getattr(function, "__code__", None)
    if _waiting.active and isinstance(plain, FunctionType) and isinstance(code, CodeType) and _CACHE in code.co_consts:
        setattr(plain, _CACHE, plain)
        _waiting.hidden.append(plain)
    return function


class _DynamoImportHook:
    """Detects the import of torch._dynamo as the first finder in ``sys.meta_path``; it never finds a module itself."""

    def __init__(self) -> None:
        self.active = False
        self.hidden: list[FunctionType] = []
        self.steps: list[tuple[FunctionType, CodeType]] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _TRACER and self.active:
            self.end()
        return None

    def begin(self) -> None:
        if _TRACER in sys.modules:
            return
        self.active = True
        sys.meta_path.insert(0, self)
        for name in ("add_param_group", "state_dict", "load_state_dict"):
            _plain_for_now(getattr(Optimizer, name))
        for optimizer in vars(torch.optim).values():
            self._plain_step(getattr(optimizer, "step", None))

    def _plain_step(self, step: object) -> None:
        """Replace an optimizer's step, which imports the tracer to break the graph before and after itself."""
        if isinstance(step, FunctionType) and _breaks_graph(step.__code__):
            self.steps.append((step, step.__code__))
            step.__code__ = _PLAIN  # in place: schedulers and hooks hold references to the function, not to the class

    def end(self) -> None:
        self.active = False  # it stays in sys.meta_path, which is being iterated over
        for function in self.hidden:
            if getattr(function, _CACHE, None) is function:
                delattr(function, _CACHE)
        for step, code in self.steps:
            step.__code__ = code


def _breaks_graph(code: CodeType) -> bool:
    return code.co_freevars == ("func",) and {"_dynamo", "graph_break", "defaults"} <= set(code.co_names)


def _without_graph_breaks(func: Callable[..., Any]) -> FunctionType:
    def step(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(args[0].defaults["differentiable"])
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    assert isinstance(step, FunctionType)
    return step


_PLAIN = _without_graph_breaks(print).__code__
_waiting = _DynamoImportHook()
_waiting.begin()
