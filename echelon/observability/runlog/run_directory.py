"""A run's directory as commands are given it, and where a run has written instead."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.observability.runlog.tolerant_json import json_file

#: In the launcher's log directory: where the run has written what it recorded, when that is another directory.
ELSEWHERE = "elsewhere.json"


def existing_directory(directory: str | Path) -> Path:
    """Return the directory that a user has named, or refuse it in one line."""
    place = Path(directory)
    if not place.is_dir():
        is_ = "is a file" if place.exists() else "does not exist"
        raise UsageError(f"'{directory}' {is_}; name the log directory of a run (by default 'log')")
    return place


def note_elsewhere(logs: Path, records: Path) -> None:
    """Leave in the launcher's directory a note on where this run's records are; never an end of the training."""
    from echelon.observability.runlog.log_files import write_whole

    if os.environ.get("RANK", "0") != "0":
        return
    if logs.absolute() == records.absolute():
        with contextlib.suppress(OSError):
            (logs / ELSEWHERE).unlink(missing_ok=True)
    elif logs.is_dir():
        write_whole(logs / ELSEWHERE, {"records": str(records.absolute())})


def records_elsewhere(directory: str | Path) -> str | None:
    """Return the directory that the run whose logs lie here has written to, where it is another one and still there."""
    found = (json_file(Path(directory) / ELSEWHERE) or {}).get("records")
    return found if isinstance(found, str) and Path(found).is_dir() else None
