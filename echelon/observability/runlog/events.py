"""Writes events.jsonl, the events of a run from its ranks and its launcher; each line is one write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from echelon.observability.runlog.log_files import EVENTS, RUN, JsonLinesFile, given_directory
from echelon.observability.runlog.run_directory import records_of

Kind = Literal["warning", "stall", "restart", "saved", "resumed", "failed", "ended", "notice"]


def note_event(directory: Path | None, kind: Kind, text: str, rank: int | None = None, **details: Any) -> None:
    """Append an event to the directory's events.jsonl; do nothing if ``directory`` is None.

    details: step, traceback and log of a failure
    """
    if directory is None:
        return
    file = JsonLinesFile(directory / EVENTS)  # opened each time: events are rare, and the directory may change
    file.write({"time": time.time(), "kind": kind, "rank": rank, "text": text, **details})
    file.close()


def note_beside(kind: Kind, text: str, rank: int | None = None, **details: Any) -> None:
    """Append an event of the launcher to the job's run log; a job that does not train has none."""
    logs = given_directory()
    directory = None if logs is None else records_of(logs)
    if directory is not None and (directory / RUN).is_file():
        note_event(directory, kind, text, rank, **details)
