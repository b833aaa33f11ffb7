"""StopAtStepHook: stops training after ``stop_at_step`` steps; with 0 the number of epochs decides."""

from __future__ import annotations

from torch import Tensor

from echelon.zoo.train.hooks.every import steps_of
from echelon.zoo.train.hooks.hook import Hook, HookContext


class StopAtStepHook(Hook):
    def begin(self, run: HookContext) -> None:
        self._last = steps_of(run.request, "stop_at_step")
        if self._last and run.steps >= self._last:
            run.stop(
                f"the run in {run.directory} is at step {run.steps} already, and stop_at_step is {self._last}: nothing "
                "is left to train; --fresh begins anew, a larger --stop_at_step goes on"
            )

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        if self._last and run.steps >= self._last:
            run.stop(f"stop_at_step is {self._last}")
