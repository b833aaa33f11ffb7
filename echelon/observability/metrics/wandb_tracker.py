"""``WandbTracker``: records of a run in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.observability.metrics.tracker_runs import TrackerRuns
from echelon.observability.metrics.trackers import Record, named_numbers


class WandbTracker:
    """Writes to the run that the script has begun, or to one of its own, which it also ends.

    options: further arguments of ``wandb.init``
    """

    name = "wandb"

    def __init__(self, options: Mapping[str, Any], runs: TrackerRuns) -> None:
        self._options, self._runs = options, runs
        self._run: Any = None
        self._is_ours = True

    def open(self) -> None:
        import wandb

        settings = self._runs.settings()
        self._is_ours = wandb.run is None
        if self._is_ours:
            earlier = self._runs.earlier(self.name)
            resume = {} if earlier is None else {"id": earlier, "resume": "allow"}
            self._run = wandb.init(**{**resume, **self._options})
            self._runs.keep(self.name, self._run.id)
        else:
            self._run = wandb.run
        self._run.config.update(settings, allow_val_change=True)
        # the run's own steps: W&B's cannot go back, as they do after a restart
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log({"step": record["step"], **named_numbers(record)})

    def close(self, failed: bool) -> None:
        if self._is_ours:
            self._run.finish(exit_code=int(failed))
