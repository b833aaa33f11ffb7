"""Command line, memory and start time of processes. It does not import torch, because servers start without it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def own_command() -> list[str]:
    """Return the whole command line of this process, as a user types it: without the paths of python and echelon."""
    interpreter, *words = sys.orig_argv or [""]
    if words and os.path.basename(words[0]) == "echelon":
        return ["echelon", *words[1:]]
    return [os.path.basename(interpreter), *words]


def process_memory() -> tuple[int | None, int | None]:
    """Return the resident bytes of this process now and at their peak."""
    try:
        with open("/proc/self/status", "rb") as status:
            result = dict(line.split(b":", 1) for line in status if line.startswith((b"VmRSS:", b"VmHWM:")))
        return 1024 * int(result[b"VmRSS"].split()[0]), 1024 * int(result[b"VmHWM"].split()[0])
    except (OSError, KeyError, ValueError):
        return None, None


def process_started(pid: int) -> float | None:
    """Return the start time of a process in seconds since the epoch; None if it is unknown."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return None
