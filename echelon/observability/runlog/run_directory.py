"""Finds a run's directory for commands, and the directory that a run has written to instead."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.observability.runlog.tolerant_json import json_file

#: File in the launcher's log directory that names the directory of the run log, if that is another one.
ELSEWHERE = "elsewhere.json"


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
        with contextlib.suppress(OSError):
            (logs / ELSEWHERE).unlink(missing_ok=True)
    elif logs.is_dir():
        write_whole(logs / ELSEWHERE, {"records": str(records.absolute())})


def records_elsewhere(directory: str | Path) -> str | None:
    """Return the other directory that the run of this launcher log has written to, if it still exists, else None."""
    found = (json_file(Path(directory) / ELSEWHERE) or {}).get("records")
    return found if isinstance(found, str) and Path(found).is_dir() else None
