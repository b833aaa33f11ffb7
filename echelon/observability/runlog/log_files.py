"""The files of a run's directory: their names, and writing to them in a way that never ends the training.

A full disk or a directory that is gone costs the record, not the run: one line says so, and from then on nothing does.
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
LOGGED = "logged"  #: among the metrics, what a script has logged itself

_settled: Path | None = None
_warned: set[Path] = set()  # directories of which this process has said that it cannot write there


def rank_file(rank: int) -> str:
    return f"rank-{rank}.jsonl"


def server_file(server: int) -> str:
    return f"server-{server}.jsonl"


def memory_file(rank: int) -> str:
    """What one rank really held; memory.json is what was reckoned for all."""
    return f"memory-{rank}.json"


def is_record(name: str) -> bool:
    """Whether a file of this name is one that a run writes down for itself, apart from its metrics."""
    numbered = name.endswith(".jsonl") and name.startswith(("rank-", "server-"))
    numbered |= name.endswith(".json") and name.startswith("memory-")
    return name in (RUN, EVENTS, MEMORY) or numbered


def set_run_directory(directory: Path) -> None:
    """What has no engine at hand writes there, too."""
    global _settled  # noqa: PLW0603 - a process belongs to one run
    _settled = directory
    if logs := os.environ.get(LOG_DIR):
        note_elsewhere(Path(logs), directory)


def given_directory() -> Path | None:
    """Where an engine of this process writes, or else where the surroundings say; None: nowhere."""
    return _settled or launcher_run_directory()


def launcher_run_directory() -> Path | None:
    """Where the launcher says that a run is to be written down."""
    name = os.environ.get(RECORD_DIR) or os.environ.get(LOG_DIR)
    return Path(name) if name else None


class JsonLinesFile:
    """A file of JSON objects, one a line. Each line is one write at the file's end, so that several processes can share
    it and a reader meets whole lines, but for the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._cut = False  # the last line did not get out whole

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
    """Write a JSON file aside, then give it its name: a reader meets the old one or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        warn(path, error)
        try:
            aside.unlink(missing_ok=True)
        except OSError:
            return  # then it stays; there is nobody to tell


def warn(path: Path, error: OSError) -> None:
    if path.parent in _warned:
        return
    _warned.add(path.parent)
    print(
        f"echelon: '{path}' cannot be written ({error.strerror or error}); training goes on, and what is missing in "
        "that directory stays missing",
        file=sys.stderr,
        flush=True,
    )
