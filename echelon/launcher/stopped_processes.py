"""``StoppedProcesses``: detects processes that remain stopped: after SIGSTOP a process cannot report it itself."""

from __future__ import annotations

import time
from collections.abc import Iterable

from echelon.launcher.stall_plugin import process_state

#: States of a process stopped by a signal or by a debugger; see proc(5).
STOPPED = ("T", "t")
#: Seconds between two checks after which this process was probably stopped itself, with the others: start over.
BLIND = 5.0


class StoppedProcesses:
    """Detects processes that are stopped for too long.

    limit:  seconds that a process may be stopped; 0: no limit
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: dict[int, float] = {}
        self._looked = time.monotonic()

    def overdue(self, pids: Iterable[int]) -> list[int]:
        """Return the processes that were stopped at every check for longer than the limit."""
        if self.limit <= 0:
            return []
        now = time.monotonic()
        known = self._since if now - self._looked < BLIND else {}
        self._looked = now
        self._since = {pid: known.get(pid, now) for pid in pids if process_state(pid) in STOPPED}
        return [pid for pid, since in self._since.items() if now - since > self.limit]
