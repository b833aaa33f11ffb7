"""A stand-in for ``torch._dynamo`` while fake tensors are used.

Fake tensors need only its configuration, and the functions that torch hides from it need only be called. The whole
package takes 2 s of CPU to import (torch 2.13), longer than a profile. Whatever asks for more of it gets the package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from echelon.base.module_stub import ModuleStub

_NAME, _CONFIG, _CACHE = "torch._dynamo", "torch._dynamo.config", "__dynamo_disable"


class _DynamoStub(ModuleStub):
    def __init__(self, path: list[str]) -> None:
        super().__init__(_NAME)
        self.__path__ = path  # submodules can be imported, such as its configuration
        self.hidden: list[Any] = []

    def disable(self, fn: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
        """Return the function: no tracer runs that it would have to be hidden from."""
        if not self.stands:  # a module that was imported within the context has kept the stand-in
            result: Callable[..., Any] = self.real().disable(fn, recursive, **options)
            return result
        self.hidden.append(fn)
        return fn

    def leave(self) -> None:
        """Remove the stand-in and what torch has cached of it."""
        super().leave()
        for function in self.hidden:
            vars(function).pop(_CACHE, None)
        self.hidden.clear()


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep torch from importing its tracer within the context, unless the tracer has been imported.

    Only for code that compiles nothing: the parts of the tracer and of the compiler import each other in a fixed order.
    """
    spec = importlib.util.find_spec(_NAME) if ModuleStub.can_stand_for(_NAME) else None
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    stub = _DynamoStub(list(spec.submodule_search_locations))
    stub.enter()
    try:
        vars(stub)["config"] = importlib.import_module(_CONFIG)
        yield
    finally:
        stub.leave()
