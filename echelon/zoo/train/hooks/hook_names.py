"""Create the hooks of ``--hooks``: built-in ones by name, others by import path."""

from __future__ import annotations

from collections.abc import Callable

from echelon.base.errors import EchelonError, UsageError, nearest
from echelon.base.object_path import callable_at
from echelon.zoo.entry import Request
from echelon.zoo.train.hooks.checkpoint_saver import CheckpointSaverHook
from echelon.zoo.train.hooks.early_stop import EarlyStopHook
from echelon.zoo.train.hooks.evaluation import EvaluationHook
from echelon.zoo.train.hooks.every import steps_of
from echelon.zoo.train.hooks.hook import Hook
from echelon.zoo.train.hooks.logging_tensor import LoggingTensorHook
from echelon.zoo.train.hooks.profiler import ProfilerHook
from echelon.zoo.train.hooks.stop_at_step import StopAtStepHook

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


def named_hooks(request: Request) -> dict[str, Hook]:
    """Return the hooks of a run by name, in order; EvaluationHook is first, because other hooks read its results."""
    asked = [_in_our_case(word.strip()) for word in request["hooks"].split(",") if word.strip()]
    asked += [hook for parameter, hook in IMPLIED.items() if steps_of(request, parameter)]
    names = sorted(dict.fromkeys(asked), key=lambda name: name != "EvaluationHook")
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
    try:
        hook = make()
    except EchelonError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"--hooks '{name}' failed with {reason}; a hook is made without arguments") from error
    if not isinstance(hook, Hook):
        raise UsageError(f"--hooks '{name}' gave {type(hook).__name__}; it must be an echelon.zoo.train.hooks.Hook")
    return hook
