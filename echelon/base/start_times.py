"""``start_times``: the seconds from the start of this process to the end of its first step, by part."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path


class StartTimes:
    """Parts of a start, in their order. A part ends where ``end`` is called, and the next one begins."""

    def __init__(self) -> None:
        self._last = time.perf_counter() - _age()
        self._parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        """End a part; of several times, as of several engines, the seconds are added."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, and those of torch's compiler among them if it was used."""
        compiled = _compile_seconds()
        found = {**self._parts, **({"compile": compiled} if compiled else {})}
        return {part: round(seconds, 3) for part, seconds in found.items()}


def _age() -> float:
    """Return the seconds since this process began; 0 if the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def _compile_seconds() -> float:
    """Return the seconds that torch.compile took so far; 0 if it was not used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    times = getattr(dynamo, "compilation_time_metrics", None) or {}
    return sum(sum(values) for name, values in times.items() if name == "_compile.compile_inner")


start_times = StartTimes()
