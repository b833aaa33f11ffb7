"""events.jsonl: what happened to a run, from its ranks and its launcher, each line one write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from echelon.observability.runlog.log_files import EVENTS, RUN, JsonLinesFile, given_directory

Kind = Literal["warning", "stall", "restart", "saved", "resumed", "failed", "ended", "notice"]


def note_event(directory: Path | None, kind: Kind, text: str, rank: int | None = None) -> None:
    """Write it down, where there is a place for it."""
    if directory is None:
        return
    file = JsonLinesFile(directory / EVENTS)  # opened anew: events are rare, and a directory may come and go
    file.write({"time": time.time(), "kind": kind, "rank": rank, "text": text})
    file.close()


def note_beside(kind: Kind, text: str, rank: int | None = None) -> None:
    """From a launcher: where a run is being written down. A job that trains nothing leaves nothing."""
    directory = given_directory()
    if directory is not None and (directory / RUN).is_file():
        note_event(directory, kind, text, rank)
