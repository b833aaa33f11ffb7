"""Optimizers without ``torch._dynamo``, for as long as nothing asks for it.

Torch hides some of its functions from torch.compile, and imports all of torch._dynamo at the first call of any of them:
every optimizer that is made does so. That is 1.1 s of CPU in every process (torch 2.13), for nothing where nothing is
compiled: what has not been imported cannot be tracing. Until somebody imports it, these functions are called as they
are; at that moment torch gets back what is its own.
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
_CACHE = "__dynamo_disable"  # where torch keeps a function's hidden form, and looks for it first


def hide_from_dynamo(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function of ours that torch.compile is to leave alone."""
    return _plain_for_now(_disable_dynamo(function))


def _plain_for_now(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Give what ``_disable_dynamo`` returned a hidden form that is the plain function itself."""
    plain = getattr(function, "__wrapped__", None)
    code = getattr(function, "__code__", None)
    if _waiting.active and isinstance(plain, FunctionType) and isinstance(code, CodeType) and _CACHE in code.co_consts:
        setattr(plain, _CACHE, plain)
        _waiting.hidden.append(plain)
    return function


class _DynamoImportHook:
    """Sees torch._dynamo being imported, as the first of the finders of modules, and never finds anything itself."""

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
        """Torch's optimizers break a traced graph before and after a step, and import the tracer to say so."""
        if isinstance(step, FunctionType) and _breaks_graph(step.__code__):
            self.steps.append((step, step.__code__))
            step.__code__ = _PLAIN  # in place: schedulers and hooks hold on to the function, not to the class

    def end(self) -> None:
        self.active = False  # it stays among the finders: they are being iterated over
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
