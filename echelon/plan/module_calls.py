"""Listening to the calls of some modules: whoever listens may answer in the module's place.

The module's class is changed, so names, weights and copies stay, and classes that others have derived before stay in
force. A module nobody listens to, such as one that is recomputed during backward, behaves as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from torch import nn

from echelon.base.errors import UsageError

#: Given a module's name, the module and what it is called with; returns what the call returns.
Listener = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _Outside:
    """A call outside ``intercept_module_calls``: made by the user, or by backward."""

    def __call__(self, *_: Any) -> NoReturn:
        raise AssertionError("unreachable")


_OUTSIDE = _Outside()
_listener: ContextVar[Listener | None] = ContextVar("listener", default=_OUTSIDE)
_NAME, _PLAIN, _STAGE = "_name_as_unit", "_class_as_no_unit", "_stage_elsewhere"


@contextlib.contextmanager
def intercept_module_calls(listener: Listener | None) -> Iterator[None]:
    """Within this context and thread, ``listener`` answers calls of modules that have been made heard."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def call_unintercepted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module with nobody listening to it or to what is inside it."""
    with intercept_module_calls(None):
        return module(*args, **kwargs)


def install_call_hooks(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Let calls of the named modules be heard. Returns the function that undoes it."""
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
            if _PLAIN in type(module).__dict__:  # else somebody derived from it since; unheard, it does nothing
                module.__class__ = type(module).__dict__[_PLAIN]
                module.__dict__.pop(_NAME, None)
                module.__dict__.pop(_STAGE, None)

    return undo


def mark_remote_stage(module: nn.Module, stage: int) -> None:
    """Let a call of the module outside of the engine be an error: its weights are on the ranks of ``stage``."""
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
        return listener(self.__dict__[_NAME], self, args, kwargs)  # user code called forward() itself

    return type(f"Heard{kind.__name__}", (kind,), {"__call__": __call__, "forward": forward, _PLAIN: kind})
