"""Names the directories of runs, and finds the one that a command is to read."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.observability.runlog.tolerant_json import json_file

#: File in the launcher's log directory that names the directory of the run log, if that is another one.
ELSEWHERE = "elsewhere.json"
#: Directory of the runs whose log directory has no name of its own.
RUNS = Path("runs")
#: Files of which a run's directory has at least one.
_WRITTEN = ("*.jsonl", "run.json", "rank-*.log", "server-*.log")


def new_run_directory(name: str) -> Path:
    """Create ``runs/NAME-1``, or the one with the next number, and return it; two jobs never get the same one."""
    RUNS.mkdir(exist_ok=True)
    while True:
        directory = next_run_directory(name)
        with contextlib.suppress(FileExistsError):  # another job was first
            directory.mkdir()
            return directory


def next_run_directory(name: str) -> Path:
    """Return the directory that ``new_run_directory`` would create."""
    endings = (path.name[len(name) + 1 :] for path in RUNS.glob(f"{glob.escape(name)}-*"))
    last = max((int(ending) for ending in endings if re.fullmatch("[0-9]{1,9}", ending)), default=0)
    return RUNS / f"{name}-{last + 1}"


def newest_run_directory() -> str:
    """Return the directory in ``runs`` to which a run has written last. Raises ``UsageError`` if there is none."""
    written = {each: _last_written(each) for each in RUNS.glob("*/")}
    if not any(written.values()):
        raise UsageError(f"there is no run in '{RUNS}'; name the log directory of a run")
    return str(max(written, key=lambda each: written[each]))


def _last_written(directory: Path) -> float:
    """Return the time of the last write to a run's files; 0.0 if the directory has none."""
    times = [0.0]
    for path in (path for pattern in _WRITTEN for path in directory.glob(pattern)):
        with contextlib.suppress(OSError):  # removed a moment ago
            times.append(path.stat().st_mtime)
    return max(times)


def records_of(logs: Path) -> Path:
    """Return the directory that holds the run log of this log directory's newest run: itself, or another one."""
    found = (json_file(logs / ELSEWHERE) or {}).get("records")
    return Path(found) if isinstance(found, str) and Path(found).is_dir() else logs


def existing_directory(directory: str | Path) -> Path:
    """Return the directory as a path. Raises ``UsageError`` if it is not a directory."""
    place = Path(directory)
    if not place.is_dir():
        is_ = "is a file" if place.exists() else "does not exist"
        raise UsageError(f"'{directory}' {is_}; name the log directory of a run (by default the newest in '{RUNS}')")
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
