"""EarlyStopHook: stops training after ``early_stop_patience`` consecutive evaluations without a lower loss.

It counts the evaluations that EvaluationHook stores, so a resumed run continues to count.
"""

from __future__ import annotations

import math
from typing import Any

from echelon.base.errors import UsageError
from echelon.zoo.train.hooks.every import steps_of
from echelon.zoo.train.hooks.hook import Hook, HookContext


class EarlyStopHook(Hook):
    def begin(self, run: HookContext) -> None:
        self._patience: int = run.request["early_stop_patience"]
        if self._patience < 1:
            raise UsageError(f"--early_stop_patience {self._patience} would never train; give 1 or more")
        if not steps_of(run.request, "eval_every_n_iters"):
            raise UsageError("it stops by evaluations, and there are none; give --eval_every_n_iters N")
        self._stop_in_time(run)

    def after_evaluation(self, run: HookContext, results: dict[str, float]) -> None:
        self._stop_in_time(run)

    def _stop_in_time(self, run: HookContext) -> None:
        best, since = _best(run.results.get("evaluations", []))
        if since >= self._patience:
            run.stop(f"{since} evaluations without a lower loss than {best['loss']:.4g} at step {best['step']}")


def _best(evaluations: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Return the evaluation with the lowest loss, and the number of later ones; a loss of NaN is never the lowest."""
    best, lowest, since = {"loss": math.inf, "step": 0}, math.inf, 0
    for one in evaluations:
        since += 1
        if one["loss"] < lowest:
            best, lowest, since = one, one["loss"], 0
    return best, since
