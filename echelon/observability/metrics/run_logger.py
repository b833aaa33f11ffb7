"""Voice: what a run says in words, on rank 0's console and among the run's events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.observability.metrics.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from echelon.observability.runlog.events import Kind
    from echelon.observability.runlog.run_log_writer import RunLogWriter


class RunLogger:
    """Every rank has one; only where it ``speaks`` is a line noted."""

    def __init__(self, watch: MetricsLogger, record: RunLogWriter, speaks: bool) -> None:
        self._watch, self._record, self._speaks = watch, record, speaks

    def say(self, text: str, kind: Kind = "notice") -> None:
        self._watch.say(text)
        if self._speaks:
            self._record.event(kind, text)

    def announce(self, lines: Iterable[str]) -> None:
        """What will run: written down with the run, and no event of it."""
        self._record.said = list(lines)
        for line in self._record.said:
            self._watch.say(line)

    def saved(self, path: Path) -> None:
        """A checkpoint is complete: an event, but no line on the console. Perhaps told from a thread."""
        if self._speaks:
            self._record.event("saved", f"saved {path}")

    def resumed(self, text: str) -> None:
        """Training goes on from what was left, and what was written down then belongs to this run."""
        self.say(text, "resumed")
        self._record.resumed()
