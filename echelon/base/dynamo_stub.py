"""A stand-in for ``torch._dynamo`` while fake tensors are used.

Fake tensors need only its configuration, and the functions that torch hides from it need only be called. The whole
package takes 2 s of CPU to import (torch 2.13), longer than a profile. Whatever asks for more of it gets the package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_NAME, _CONFIG, _CACHE = "torch._dynamo", "torch._dynamo.config", "__dynamo_disable"


class _DynamoStub(ModuleType):
    def __init__(self, path: list[str]) -> None:
        super().__init__(_NAME)
        self.__path__ = path  # submodules can be imported, such as its configuration
        self.hidden: list[Any] = []

    def disable(self, fn: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
        """Return the function: no tracer runs that it would have to be hidden from."""
        if sys.modules.get(_NAME) is not self:  # a module that was imported within the context has kept the stand-in
            result: Callable[..., Any] = importlib.import_module(_NAME).disable(fn, recursive, **options)
            return result
        self.hidden.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_NAME), name)

    def leave(self) -> None:
        """Remove the stand-in and what torch has cached of it."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            del torch._dynamo
        for function in self.hidden:
            vars(function).pop(_CACHE, None)
        self.hidden.clear()


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep torch from importing its tracer within the context, unless the tracer has been imported.

    Only for code that compiles nothing: the parts of the tracer and of the compiler import each other in a fixed order.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    stub = _DynamoStub(list(spec.submodule_search_locations))
    sys.modules[_NAME] = stub
    torch._dynamo = stub
    try:
        vars(stub)["config"] = importlib.import_module(_CONFIG)
        yield
    finally:
        stub.leave()
