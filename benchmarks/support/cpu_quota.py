"""Part of a core for each of some processes, whether others need theirs or not: control groups. Linux, root.

Ranks that merely share cores are no devices: where one waits, as in a pipeline, the others become quicker.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FIRST, _SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PERIOD = 5_000  # microseconds in which a process may use up its part: short beside a step


class Quotas:
    """``quotas.give(pid, 0.5)``: half a core for that process and its threads, until ``close``."""

    def __init__(self) -> None:
        self._groups: list[Path] = []

    def give(self, pid: int, cores: float) -> None:
        quota = max(1000, int(cores * PERIOD))
        old = (_FIRST / "cpu.cfs_quota_us").exists()
        group = (_FIRST if old else _SECOND) / f"echelon-{os.getpid()}-{pid}"
        group.mkdir()
        self._groups.append(group)
        if old:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        (group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Once the processes are gone: a group that has some stays."""
        for group in self._groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        self._groups.clear()
