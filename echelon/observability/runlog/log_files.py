"""Names of the files in a run's directory, and writers that never end the training.

With a full disk or a missing directory the record is lost, but the run continues; one warning per directory is printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from echelon.base.environment import LOG_DIR, RECORD_DIR
from echelon.observability.runlog.run_directory import note_elsewhere

RUN, METRICS, EVENTS, MEMORY = "run.json", "metrics.jsonl", "events.jsonl", "memory.json"
TRACKERS = "trackers.json"  #: the ids of the run in its trackers
CORPORA = "corpora"  #: key of the samples that each corpus of a mixture has given
LOGGED = "logged"  #: key of the numbers that a script has logged itself

_settled: Path | None = None
_warned: set[Path] = set()  # directories for which this process has printed a warning


def rank_file(rank: int) -> str:
    return f"rank-{rank}.jsonl"


def server_file(server: int) -> str:
    return f"server-{server}.jsonl"


def memory_file(rank: int) -> str:
    """Return the name of the file with the measured memory of a rank; memory.json has the estimate for all ranks."""
    return f"memory-{rank}.json"


def is_record(name: str) -> bool:
    """Return True if a run writes a file of this name, apart from its metrics."""
    numbered = name.endswith(".jsonl") and name.startswith(("rank-", "server-"))
    numbered |= name.endswith(".json") and name.startswith("memory-")
    return name in (RUN, EVENTS, MEMORY, TRACKERS) or numbered


def set_run_directory(directory: Path) -> None:
    """Set the run directory of this process, for code without access to the engine."""
    global _settled  # noqa: PLW0603 - a process belongs to one run
    _settled = directory
    if logs := os.environ.get(LOG_DIR):
        note_elsewhere(Path(logs), directory)


def given_directory() -> Path | None:
    """Return the run directory of this process's engine, else the launcher's; None if there is none."""
    return _settled or launcher_run_directory()


def launcher_run_directory() -> Path | None:
    """Return the run directory from the launcher's environment variables, or None."""
    name = os.environ.get(RECORD_DIR) or os.environ.get(LOG_DIR)
    return Path(name) if name else None


class JsonLinesFile:
    """A file with one JSON object per line.

    Each line is one append, so that several processes can share the file, and only its last line may be incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._cut = False  # True if the last line was not written completely

    def write(self, record: dict[str, Any]) -> None:
        line = ("\n" if self._cut else "") + json.dumps(record, separators=(",", ":"), default=str) + "\n"
        data = line.encode()
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._cut = os.write(self._file, data) < len(data)
        except OSError as error:
            warn(self.path, error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def write_whole(path: Path, value: Any) -> None:
    """Write a JSON file under another name and rename it, so that a reader sees the old or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        warn(path, error)
        try:
            aside.unlink(missing_ok=True)
        except OSError:
            return  # the temporary file stays; the warning is already printed


def warn(path: Path, error: OSError) -> None:
    if path.parent in _warned:
        return
    _warned.add(path.parent)
    print(
        f"echelon: '{path}' cannot be written ({error.strerror or error}); training goes on, and lines that are not "
        "written are lost",
        file=sys.stderr,
        flush=True,
    )
