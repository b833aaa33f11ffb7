"""Built-in hooks, except ProfilerHook: stop at a step, log lines, save checkpoints, evaluate, stop early."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.base.errors import UsageError
from echelon.base.option_checks import at_least
from echelon.distributed.collectives import gather_json
from echelon.zoo.entry import Request
from echelon.zoo.train.hooks.hook import EveryNSteps, Hook, HookContext, steps_of

#: Name of the file with the evaluations of a run.
EVALUATIONS = "evaluations.json"
Evaluations = list[dict[str, Any]]


class StopAtStepHook(Hook):
    """Stops training after ``stop_at_step`` steps; with 0 the number of epochs decides."""

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


class LoggingTensorHook(Hook):
    """Logs loss and speed every ``log_loss_every_n_iters`` steps; 0 disables it.

    The engine prints the lines, because it can do so without waiting for the GPU.
    """

    def log_options(self, request: Request) -> dict[str, Any]:
        every = steps_of(request, "log_loss_every_n_iters")
        return {"every": every, "lines": True} if every else {}


class CheckpointSaverHook(Hook):
    """Saves a checkpoint every ``save_checkpoints_steps`` steps, in the background."""

    def checkpoint_options(self, request: Request) -> dict[str, Any]:
        every = steps_of(request, "save_checkpoints_steps")
        return {"every": every} if every else {}


class EvaluationHook(Hook):
    """Evaluates the test part every ``eval_every_n_iters`` steps.

    All evaluations so far are in ``run.results["evaluations"]`` and, for a resume, in ``evaluations.json`` in the run's
    directory. A resume goes back to a checkpoint: evaluations of later steps are dropped, because they are done again.
    """

    def __init__(self) -> None:
        self.report: Callable[[HookContext, dict[str, float]], None] = _do_nothing  #: callback for other hooks

    def begin(self, run: HookContext) -> None:
        self._every = EveryNSteps(run.request, "eval_every_n_iters")
        if self._every.steps and run.data.test is None:
            raise UsageError("the data set has no test part to evaluate; leave --eval_every_n_iters out")
        found = [one for one in _read_evaluations(run) if one["step"] <= run.steps]
        run.results["evaluations"] = _of_rank_0(run, found)

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        if not self._every.due(run.steps):
            return
        results = run.evaluate()
        evaluations: Evaluations = run.results["evaluations"]
        evaluations.append({"step": run.steps, **results})
        if run.engine.world.rank == 0:
            _write_evaluations(run.directory / EVALUATIONS, evaluations)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
        run.say(f"step {run.steps}: evaluated: {figures}")
        self.report(run, results)


class EarlyStopHook(Hook):
    """Stops training after ``early_stop_patience`` consecutive evaluations without a lower loss.

    It counts the evaluations that EvaluationHook stores, so a resumed run continues to count.
    """

    def begin(self, run: HookContext) -> None:
        self._patience: int = run.request["early_stop_patience"]
        at_least(1, "--early_stop_patience", self._patience)
        if not steps_of(run.request, "eval_every_n_iters"):
            raise UsageError("EarlyStopHook needs evaluations, and there are none; give --eval_every_n_iters N")
        self._stop_in_time(run)

    def after_evaluation(self, run: HookContext, results: dict[str, float]) -> None:
        self._stop_in_time(run)

    def _stop_in_time(self, run: HookContext) -> None:
        best, since = _best(run.results.get("evaluations", []))
        if since >= self._patience:
            run.stop(f"{since} evaluations without a lower loss than {best['loss']:.4g} at step {best['step']}")


def _do_nothing(run: HookContext, results: dict[str, float]) -> None:
    """Do nothing; the default callback of a hook that is used alone."""


def _of_rank_0(run: HookContext, evaluations: Evaluations) -> Evaluations:
    """Return the evaluations of rank 0: other hosts may not see the file, and all ranks must use the same list."""
    group = run.engine.world.control
    return evaluations if group is None else gather_json(evaluations, group)[0]


def _read_evaluations(run: HookContext) -> Evaluations:
    try:
        result = json.loads((run.directory / EVALUATIONS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        result = None
    if not isinstance(result, list) or not all(map(_is_evaluation, result)):
        raise UsageError(f"'{run.directory / EVALUATIONS}' is damaged; remove it, and evaluations are counted anew")
    return result


def _is_evaluation(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("step"), int) and isinstance(value.get("loss"), float)


def _write_evaluations(path: Path, evaluations: Evaluations) -> None:
    aside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(evaluations), encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror}; give another --output_dir") from None


def _best(evaluations: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Return the evaluation with the lowest loss, and the number of later ones; a loss of NaN is never the lowest."""
    best, lowest, since = {"loss": math.inf, "step": 0}, math.inf, 0
    for one in evaluations:
        since += 1
        if one["loss"] < lowest:
            best, lowest, since = one, one["loss"], 0
    return best, since
