"""Hook: base class of actions of a run besides training, also for user-defined hooks; EveryNSteps: their period."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from echelon.base.errors import UsageError
from echelon.data import Loader
from echelon.engine.engine import Engine
from echelon.zoo.entry import Data, Request


class HookContext(Protocol):
    """The interface of a run for hooks.

    steps:       number of updates so far, including those before a resume
    total_steps: number of updates of the whole run; None if not known
    results:     further entries of the final JSON line
    """

    results: dict[str, Any]

    @property
    def engine(self) -> Engine: ...
    @property
    def request(self) -> Request: ...
    @property
    def loader(self) -> Loader: ...
    @property
    def data(self) -> Data: ...
    @property
    def directory(self) -> Path: ...
    @property
    def steps(self) -> int: ...
    @property
    def total_steps(self) -> int | None: ...

    def stop(self, reason: str) -> None:
        """Stop the run after this step, or before the first one if called in ``begin``; all ranks must call this."""

    def say(self, line: str) -> None:
        """Print a line on the console of rank 0."""

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics over the test part; empty if there is none. All ranks call it together."""


class Hook:
    """Base class of hooks. The constructor gets no arguments; parameters of the run are in ``run.request``.

    Every method is called on all ranks.
    """

    def log_options(self, request: Request) -> dict[str, Any]:
        """Return options for the engine's Log; called before the engine exists."""
        return {}

    def checkpoint_options(self, request: Request) -> dict[str, Any]:
        """Return options for the engine's Checkpoint; called before the engine exists."""
        return {}

    def begin(self, run: HookContext) -> None:
        """Prepare the hook; called before the first step, after a resume."""

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        """Handle the end of a step; ``loss`` is on the device, so reading its value waits for the GPU."""

    def after_evaluation(self, run: HookContext, results: dict[str, float]) -> None:
        """Handle an evaluation of EvaluationHook; ``run.results["evaluations"]`` has all of them, this one last."""

    def end(self, run: HookContext) -> None:
        """Finish the hook; called after the last step, unless an error ended training."""


class EveryNSteps:
    """The period that a parameter sets, in steps; 0 means never.

    With gradient accumulation a step takes several calls; the action is due only once.
    """

    def __init__(self, request: Request, parameter: str) -> None:
        self.steps = steps_of(request, parameter)
        self._last = 0

    def due(self, step: int) -> bool:
        if not self.steps or step % self.steps or step <= self._last:
            return False
        self._last = step
        return True


def steps_of(request: Request, parameter: str) -> int:
    """Return the value of a parameter that is a number of steps; raise UsageError if it is negative."""
    steps: int = request[parameter]
    if steps < 0:
        raise UsageError(f"--{parameter} {steps} is no number of steps; give 1 or more, or 0 for none")
    return steps
