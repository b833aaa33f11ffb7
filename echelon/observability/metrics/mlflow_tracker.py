"""``MlflowTracker``: records of a run in MLflow."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from echelon.observability.metrics.tracker_runs import TrackerRuns
from echelon.observability.metrics.trackers import Record, named_numbers

#: Most characters of a parameter, and most parameters of one request.
LONGEST, TOGETHER = 500, 100


class MlflowTracker:
    """Writes to the run that the script has begun, or to one of its own, which it also ends.

    Created in the script's thread, because MLflow keeps the active run by thread.

    options: experiment_name, run_name, tracking_uri, tags; by default those of MLflow's environment variables
    """

    name = "mlflow"

    def __init__(self, options: Mapping[str, Any], runs: TrackerRuns) -> None:
        self._options, self._runs = options, runs
        active = sys.modules["mlflow"].active_run() if "mlflow" in sys.modules else None
        self._run_id: str = "" if active is None else active.info.run_id
        self._is_ours = active is None
        self._client: Any = None

    def open(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._options.get("tracking_uri"))
        earlier = self._runs.earlier(self.name) or os.environ.get("MLFLOW_RUN_ID")
        if self._is_ours and earlier:
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
        elif self._is_ours:
            name = self._options.get("run_name") or os.environ.get("MLFLOW_RUN_NAME")
            run = self._client.create_run(self._experiment(), run_name=name, tags=self._options.get("tags"))
            self._run_id = run.info.run_id
        self._runs.keep(self.name, self._run_id)
        self._log_settings()

    def _experiment(self) -> str:
        name = self._options.get("experiment_name") or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _log_settings(self) -> None:
        """Write the settings that the run does not have: MLflow does not change a parameter."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        params = [Param(name, value) for name, value in flat(self._runs.settings()) if name not in known]
        for begin in range(0, len(params), TOGETHER):
            self._client.log_batch(self._run_id, params=params[begin : begin + TOGETHER])

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric

        at = round(1e3 * record.get("time", time.time()))
        found = named_numbers(record).items()
        self._client.log_batch(self._run_id, metrics=[Metric(_legal(n), v, at, record["step"]) for n, v in found])

    def close(self, failed: bool) -> None:
        if self._is_ours:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings as ``a.b``, with their values as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield _legal(f"{prefix}{name}"), str(value)[:LONGEST]


def _legal(name: str) -> str:
    """Return the name with ``_`` for characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name)
