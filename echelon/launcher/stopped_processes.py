"""Processes that are stopped and stay so: one that got SIGSTOP cannot say it, and would be waited for in vain."""

from __future__ import annotations

import time
from collections.abc import Iterable

from echelon.launcher.stall_plugin import process_state

#: By a signal, by a debugger; see proc(5).
STOPPED = ("T", "t")
#: Seconds between two looks after which we stood still ourselves, perhaps with those we look at: count anew.
BLIND = 5.0


class StoppedProcesses:
    """limit: seconds that a process may be stopped; 0: for ever"""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: dict[int, float] = {}
        self._looked = time.monotonic()

    def overdue(self, pids: Iterable[int]) -> list[int]:
        """Those that were stopped at every look for longer than the limit."""
        if self.limit <= 0:
            return []
        now = time.monotonic()
        known = self._since if now - self._looked < BLIND else {}
        self._looked = now
        self._since = {pid: known.get(pid, now) for pid in pids if process_state(pid) in STOPPED}
        return [pid for pid, since in self._since.items() if now - since > self.limit]
