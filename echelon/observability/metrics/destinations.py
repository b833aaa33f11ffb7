"""The sinks of ``Log.to``: files and trackers, as far as their libraries are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.observability.metrics.sinks import JsonLinesSink, Sink, TensorBoardSink, find_event_writer
from echelon.observability.metrics.tracker_runs import TrackerRuns
from echelon.observability.metrics.trackers import BackgroundSink, FunctionTracker, Tracker
from echelon.strategy.log_settings import Log

#: Destinations that write into the directory of the run.
FILES = ("jsonl", "tensorboard")


class Destinations:
    """The destinations of a run on rank 0, which are opened with the first record.

    directory: directory of the run; metrics.jsonl is always written if there is one
    is_first:  False on ranks other than 0, which have no destinations
    """

    def __init__(self, log: Log, directory: Path | None, is_first: bool = True) -> None:
        self._given, self._directory = log.destinations(), directory
        names = {name for name, _ in self._given if isinstance(name, str)}
        for name in FILES:
            if name in names and directory is None:
                asked = f"{name}=True" if getattr(log, name, False) else f"to='{name}'"
                raise UsageError(f"Log({asked}) needs a directory: give Log(dir=...), or use 'echelon run'")
        if not is_first:
            self._given, names = [], set()
        self._event_writer = find_event_writer() if "tensorboard" in names else None
        libraries = names - set(FILES)
        self._missing = {name for name in libraries if importlib.util.find_spec(name) is None}
        if "tensorboard" in names and self._event_writer is None:
            self._missing.add("tensorboard")

    @property
    def notices(self) -> list[str]:
        """Log lines on destinations whose libraries are missing. The run continues without them."""
        what = {"tensorboard": "no event files are written"}
        return [
            f"{name}: not installed, so {what.get(name, 'it gets no records')}; pip install 'echelon[{name}]'"
            for name in sorted(self._missing)
        ]

    @property
    def has_trackers(self) -> bool:
        return any(name not in FILES and name not in self._missing for name, _ in self._given)

    def open(self, runs: TrackerRuns, warn: Callable[[str], None], opened: Callable[[], None]) -> list[Sink]:
        """Return the sinks of all destinations; see ``BackgroundSink`` for the callbacks."""
        files: list[Sink] = [] if self._directory is None else [JsonLinesSink(self._directory)]
        if self._event_writer is not None and self._directory is not None:
            files.append(TensorBoardSink(self._directory, self._event_writer))
        return [*files, *(BackgroundSink(tracker, warn, opened) for tracker in self._trackers(runs))]

    def _trackers(self, runs: TrackerRuns) -> list[Tracker]:
        found: list[Tracker] = []
        for name, options in self._given:
            if callable(name):
                found.append(FunctionTracker(name))
            elif name not in FILES and name not in self._missing:
                found.append(_tracker(name)(options, runs))
        return found


def _tracker(name: str) -> Any:
    if name == "wandb":
        from echelon.observability.metrics.wandb_tracker import WandbTracker

        return WandbTracker
    from echelon.observability.metrics.mlflow_tracker import MlflowTracker

    return MlflowTracker
