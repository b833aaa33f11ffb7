"""What the kernel knows of processes: memory, and since when they are. Without torch: servers start without it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_memory() -> tuple[int | None, int | None]:
    """Bytes now and at most so far."""
    try:
        with open("/proc/self/status", "rb") as status:
            found = dict(line.split(b":", 1) for line in status if line.startswith((b"VmRSS:", b"VmHWM:")))
        return 1024 * int(found[b"VmRSS"].split()[0]), 1024 * int(found[b"VmHWM"].split()[0])
    except (OSError, KeyError, ValueError):
        return None, None


def process_started(pid: int) -> float | None:
    """When that process was started, by the time of day; None where that is not told."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return None
