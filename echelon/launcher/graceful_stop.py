"""Graceful stop of ranks that have installed a preemption handler."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from echelon.base.environment import LEAVE_MARK, REQUEUE

#: Seconds between two checks that the ranks have ended.
_LOOK = 0.05


class GracefulStopMarkers:
    """The directory in which a rank that can save and stop creates a file; it is emptied for every round."""

    def __init__(self, records: Path) -> None:
        self._directory = records / "leave"
        self._directory.mkdir(mode=0o700, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {LEAVE_MARK: str(self._directory)}

    def clear(self) -> None:
        for mark in self._directory.iterdir():
            mark.unlink(missing_ok=True)

    def forget(self, rank: int) -> None:
        (self._directory / f"rank-{rank}").unlink(missing_ok=True)

    def has(self, rank: int) -> bool:
        return (self._directory / f"rank-{rank}").exists()


def request_graceful_stop(pids: Iterable[int], codes: Callable[[], list[int | None]], grace: float) -> bool:
    """Send SIGTERM and wait; return True if all processes have saved and exited in time."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while None in codes() and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return all_stopped_gracefully(codes())


def all_stopped_gracefully(codes: Iterable[int | None]) -> bool:
    """Return True if all have saved and exited, or have finished their work."""
    return all(code in (0, REQUEUE) for code in codes)
