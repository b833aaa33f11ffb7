"""Ranks that can save and leave when they are asked to: who can, and letting them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from echelon.base.environment import LEAVE_MARK, REQUEUE

#: How often to look whether they have gone.
_LOOK = 0.05


class GracefulStopMarkers:
    """The directory in which a rank that can save and stop puts a file; emptied for every round."""

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
    """Ask them to save and end, and wait; whether all have, in time and of their own will."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while None in codes() and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return all_stopped_gracefully(codes())


def all_stopped_gracefully(codes: Iterable[int | None]) -> bool:
    """All have saved and ended, or are through with all their work."""
    return all(code in (0, REQUEUE) for code in codes)
