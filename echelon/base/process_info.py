"""Memory and start time of processes, read from /proc. It does not import torch, because servers start without it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_memory() -> tuple[int | None, int | None]:
    """Return the resident bytes of this process now and at their peak."""
    try:
        with open("/proc/self/status", "rb") as status:
            found = dict(line.split(b":", 1) for line in status if line.startswith((b"VmRSS:", b"VmHWM:")))
        return 1024 * int(found[b"VmRSS"].split()[0]), 1024 * int(found[b"VmHWM"].split()[0])
    except (OSError, KeyError, ValueError):
        return None, None


def process_started(pid: int) -> float | None:
    """Return the start time of a process in seconds since the epoch; None if it is unknown."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return None
