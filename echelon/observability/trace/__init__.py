"""Timelines: traces of some steps of a run, of all ranks on one clock; ``summarize(DIR)`` returns the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["summarize"]


def summarize(directory: str | Path) -> dict[str, Any]:
    """Return the figures of the newest trace in a run's directory, as in ``timeline/summary.json``."""
    from echelon.observability.trace.trace_report import summary_of

    return summary_of(directory).figures
