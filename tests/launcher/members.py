"""The processes of a job, found by the logs that they have open: of forked ones /proc shows another environment."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def members(logs: Path) -> dict[str, int]:
    """The job's living processes by the names of their logs: "server-0", "rank-1"."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # one that is ending
            if entry.name.isdigit() and str(logs) in (entry / "cmdline").read_text(errors="replace").split("\0"):
                opened = _opened(entry / "fd")
                found |= {path.stem: int(entry.name) for path in opened if (path.parent, path.suffix) == (logs, ".log")}
    return found


def _opened(folder: Path) -> list[Path]:
    """Files that a process has open; those that it closes while we look do not hide the others."""
    found = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append(Path(os.readlink(entry)))
    return found
