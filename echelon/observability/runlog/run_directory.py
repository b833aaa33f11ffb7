"""Finds a run's directory for commands, and the directory that a run has written to instead."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.observability.runlog.tolerant_json import json_file

#: File in the launcher's log directory that names the directory of the run log, if that is another one.
ELSEWHERE = "elsewhere.json"


def records_of(logs: Path) -> Path:
    """Return the directory that holds the run log of this log directory's newest run: itself, or another one."""
    found = (json_file(logs / ELSEWHERE) or {}).get("records")
    return Path(found) if isinstance(found, str) and Path(found).is_dir() else logs


def existing_directory(directory: str | Path) -> Path:
    """Return the directory as a path. Raises ``UsageError`` if it is not a directory."""
    place = Path(directory)
    if not place.is_dir():
        is_ = "is a file" if place.exists() else "does not exist"
        raise UsageError(f"'{directory}' {is_}; name the log directory of a run (by default 'log')")
    return place


def note_elsewhere(logs: Path, records: Path) -> None:
    """Write the directory of this run's log into the launcher's directory; a failure does not end the training."""
    from echelon.observability.runlog.log_files import write_whole

    if os.environ.get("RANK", "0") != "0":
        return
    if logs.absolute() == records.absolute():
        forget_elsewhere(logs)
    elif logs.is_dir():
        write_whole(logs / ELSEWHERE, {"records": str(records.absolute())})


def forget_elsewhere(logs: Path) -> None:
    """Remove the name of the directory to which an earlier run of this log directory has written."""
    with contextlib.suppress(OSError):
        (logs / ELSEWHERE).unlink(missing_ok=True)
