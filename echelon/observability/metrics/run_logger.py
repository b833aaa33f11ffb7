"""``RunLogger``: writes the log lines of a run to rank 0's console and to the run's events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.observability.metrics.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from echelon.observability.runlog.events import Kind
    from echelon.observability.runlog.run_log_writer import RunLogWriter


class RunLogger:
    """Log lines of one rank; only the rank that ``speaks`` writes them."""

    def __init__(self, watch: MetricsLogger, record: RunLogWriter, speaks: bool) -> None:
        self._watch, self._record, self._speaks = watch, record, speaks

    def say(self, text: str, kind: Kind = "notice") -> None:
        self._watch.say(text)
        if self._speaks:
            self._record.event(kind, text)

    def announce(self, lines: Iterable[str]) -> None:
        """Print the startup lines and store them in run.json, not as events."""
        for line in self._record.announced(lines):
            self._watch.say(line)

    def saved(self, path: Path) -> None:
        """Write an event for a complete checkpoint, without a console line; may be called from a thread."""
        if self._speaks:
            self._record.event("saved", f"saved {path}")

    def resumed(self, text: str) -> None:
        """Log that training was resumed; the existing files in the run directory then belong to this run."""
        self.say(text, "resumed")
        self._record.resumed()
