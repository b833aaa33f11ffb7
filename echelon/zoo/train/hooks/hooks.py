"""Hooks: all hooks of a run in their order, and the options that they set on the engine.

``--hooks`` gives built-in hooks by name, others by import path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from echelon.base.errors import EchelonError, UsageError, nearest
from echelon.base.object_path import callable_at, user_code
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.observability.metrics import Log
from echelon.zoo.entry import Request
from echelon.zoo.train.hooks.built_in import (
    CheckpointSaverHook,
    EarlyStopHook,
    EvaluationHook,
    LoggingTensorHook,
    StopAtStepHook,
)
from echelon.zoo.train.hooks.hook import Hook, HookContext, steps_of
from echelon.zoo.train.hooks.profiler import ProfilerHook

HOOKS: dict[str, Callable[[], Hook]] = {
    "StopAtStepHook": StopAtStepHook,
    "LoggingTensorHook": LoggingTensorHook,
    "ProfilerHook": ProfilerHook,
    "CheckpointSaverHook": CheckpointSaverHook,
    "EvaluationHook": EvaluationHook,
    "EarlyStopHook": EarlyStopHook,
}
#: A nonzero value of one of these parameters, which are 0 by default, enables the hook.
IMPLIED = {
    "profile_every_n_iters": "ProfilerHook",
    "save_checkpoints_steps": "CheckpointSaverHook",
    "eval_every_n_iters": "EvaluationHook",
}


class Hooks:
    """All hooks of a run. Each call goes to every hook, and an error of a hook names it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.by_name = named_hooks(request)
        for hook in self.by_name.values():
            if isinstance(hook, EvaluationHook):
                hook.report = self.after_evaluation

    @property
    def stops_at_step(self) -> bool:
        return "StopAtStepHook" in self.by_name

    def log(self, **options: Any) -> Log:
        """Return the engine's Log: these options, overridden by hooks; lines for steps only if a hook requests them."""
        for name, hook in self.by_name.items():
            with _naming(name):
                options |= hook.log_options(self._request)
        return Log(**{"lines": False, **options})

    def checkpoint(self, **options: Any) -> Checkpoint:
        """Return the engine's Checkpoint: these options, overridden by hooks."""
        for name, hook in self.by_name.items():
            with _naming(name):
                options |= hook.checkpoint_options(self._request)
        return Checkpoint(**options)

    def begin(self, run: HookContext) -> None:
        for name, hook in self.by_name.items():
            with _naming(name):
                hook.begin(run)

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        for name, hook in self.by_name.items():
            with _naming(name, run):
                hook.after_step(run, loss)

    def after_evaluation(self, run: HookContext, results: dict[str, float]) -> None:
        for name, hook in self.by_name.items():
            with _naming(name, run):
                hook.after_evaluation(run, results)

    def end(self, run: HookContext) -> None:
        for name, hook in self.by_name.items():
            with _naming(name, run):
                hook.end(run)


@contextlib.contextmanager
def _naming(name: str, run: HookContext | None = None) -> Iterator[None]:
    """Add the hook's name and the step to errors raised inside; an EchelonError keeps its class."""
    place = f"{name}, step {run.steps}" if run is not None else name
    try:
        yield
    except EchelonError as error:
        if hasattr(error, "hook"):  # already named: the hook was called by another hook
            raise
        raise _marked(type(error)(f"{place}: {error}"), name) from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise _marked(UsageError(f"{place}: failed with {reason}; mend the hook, or leave it out"), name) from error


def _marked(error: EchelonError, name: str) -> EchelonError:
    error.hook = name  # type: ignore[attr-defined]
    return error


def named_hooks(request: Request) -> dict[str, Hook]:
    """Return the hooks of a run by name, in order; EvaluationHook is first, because other hooks read its results."""
    requested = [_in_our_case(word.strip()) for word in request["hooks"].split(",") if word.strip()]
    requested += [hook for parameter, hook in IMPLIED.items() if steps_of(request, parameter)]
    names = sorted(dict.fromkeys(requested), key=lambda name: name != "EvaluationHook")
    return {name: _made(name) for name in names}


def _in_our_case(name: str) -> str:
    """Return the correct spelling of a hook's name, which users may write in any case."""
    return next((known for known in HOOKS if known.lower() == name.lower()), name)


def _made(name: str) -> Hook:
    if name in HOOKS:
        return HOOKS[name]()
    if ":" not in name:
        raise UsageError(f"--hooks: there is no hook '{name}'{nearest(name, HOOKS)}; others as package.module:Class")
    make = callable_at(name, "--hooks")
    with user_code("--hooks", name, "; a hook is made without arguments"):
        hook = make()
    if not isinstance(hook, Hook):
        raise UsageError(f"--hooks '{name}' gave {type(hook).__name__}; it must be an echelon.zoo.train.hooks.Hook")
    return hook
