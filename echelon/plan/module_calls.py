"""Interception of module calls: a listener may answer a call in place of the module.

The module's class is replaced by a subclass, so names, weights and copies are kept, and earlier changes of the class
stay in effect. Without a listener, as during recomputation in backward, the module behaves as usual.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from torch import nn

from echelon.base.errors import UsageError

#: Gets a module's name, the module, and the arguments of the call; returns the result of the call.
Listener = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _Outside:
    """Marks calls outside of ``intercept_module_calls``: made by user code, or by backward."""

    def __call__(self, *_: Any) -> NoReturn:
        raise AssertionError("unreachable")


_OUTSIDE = _Outside()
_listener: ContextVar[Listener | None] = ContextVar("listener", default=_OUTSIDE)
_NAME, _PLAIN, _STAGE = "_name_as_unit", "_class_as_no_unit", "_stage_elsewhere"


@contextlib.contextmanager
def intercept_module_calls(listener: Listener | None) -> Iterator[None]:
    """Let ``listener`` answer the calls of modules with call hooks, within this context and thread.

    listener: answers calls; None: modules run themselves
    """
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def call_unintercepted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module without interception of the module or its submodules."""
    with intercept_module_calls(None):
        return module(*args, **kwargs)


def install_call_hooks(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Make the calls of the named modules interceptable; return a function that undoes it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    changed: list[nn.Module] = []
    for name in names:
        module = modules[name]
        if _PLAIN not in type(module).__dict__:
            module.__class__ = _heard(type(module))  # type: ignore[arg-type]
            module.__dict__[_NAME] = name
            changed.append(module)

    def undo() -> None:
        for module in changed:
            if _PLAIN in type(module).__dict__:  # else its class was replaced since; without a listener it is harmless
                module.__class__ = type(module).__dict__[_PLAIN]
                module.__dict__.pop(_NAME, None)
                module.__dict__.pop(_STAGE, None)

    return undo


def mark_remote_stage(module: nn.Module, stage: int) -> None:
    """Make calls of the module outside of the engine an error: its weights are on the ranks of ``stage``."""
    module.__dict__[_STAGE] = stage


def _present(module: nn.Module) -> Listener | None:
    listener = _listener.get()
    if listener is not _OUTSIDE:
        return listener
    if _STAGE in module.__dict__:
        raise UsageError(
            f"the model was called past the engine: '{module.__dict__[_NAME]}' is in stage {module.__dict__[_STAGE]} "
            "of a pipeline, and not on this rank; use engine.step() and engine.evaluate(), or load "
            "engine.whole_state() into a model of its own (for generate(), say)"
        )
    return None


@functools.cache
def _heard(kind: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = _present(self)
        if listener is None:
            return kind.__call__(self, *args, **kwargs)
        return listener(self.__dict__[_NAME], self, args, kwargs)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = _present(self)
        if listener is None:
            return kind.forward(self, *args, **kwargs)
        return listener(self.__dict__[_NAME], self, args, kwargs)  # user code called forward() directly

    return type(f"Heard{kind.__name__}", (kind,), {"__call__": __call__, "forward": forward, _PLAIN: kind})
