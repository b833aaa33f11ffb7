"""EvaluationHook: evaluates the test part every ``eval_every_n_iters`` steps.

All evaluations so far are in ``run.results["evaluations"]`` and, for a resume, in ``evaluations.json`` in the run's
directory. A resume goes back to a checkpoint: evaluations of later steps are dropped, because they are done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.collectives import gather_json
from echelon.zoo.train.hooks.every import EveryNSteps
from echelon.zoo.train.hooks.hook import Hook, HookContext

FILE = "evaluations.json"

Evaluations = list[dict[str, Any]]


class EvaluationHook(Hook):
    def __init__(self) -> None:
        self.tell: Callable[[HookContext, dict[str, float]], None] = _nobody  #: callback for other hooks

    def begin(self, run: HookContext) -> None:
        self._every = EveryNSteps(run.request, "eval_every_n_iters")
        if self._every.steps and run.data.test is None:
            raise UsageError("the data set has no test part to evaluate; leave --eval_every_n_iters out")
        run.results["evaluations"] = _of_rank_0(run, [one for one in _read(run) if one["step"] <= run.steps])

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        if not self._every.due(run.steps):
            return
        results = run.evaluate()
        evaluations: Evaluations = run.results["evaluations"]
        evaluations.append({"step": run.steps, **results})
        if run.engine.world.rank == 0:
            _write(run.directory / FILE, evaluations)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
        run.say(f"step {run.steps}: evaluated: {figures}")
        self.tell(run, results)


def _nobody(run: HookContext, results: dict[str, float]) -> None:
    """Do nothing; the default callback of a hook that is used alone."""


def _of_rank_0(run: HookContext, evaluations: Evaluations) -> Evaluations:
    """Return the evaluations of rank 0: other hosts may not see the file, and all ranks must use the same list."""
    group = run.engine.world.control
    return evaluations if group is None else gather_json(evaluations, group)[0]


def _read(run: HookContext) -> Evaluations:
    try:
        found = json.loads((run.directory / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list) or not all(map(_is_evaluation, found)):
        raise UsageError(f"'{run.directory / FILE}' is damaged; remove it, and evaluations are counted anew")
    return found


def _is_evaluation(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("step"), int) and isinstance(value.get("loss"), float)


def _write(path: Path, evaluations: Evaluations) -> None:
    aside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(evaluations), encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror}; give another --output_dir") from None
