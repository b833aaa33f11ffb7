"""Replicates snapshots to another host in the background, and lets all ranks agree that every snapshot is complete.

A snapshot may replace the one before the last only if the last is complete on every rank. So after each snapshot the
ranks vote, on their own process group, while the next step computes; a rank that failed votes no, and all ranks stop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from echelon.base.errors import EchelonError, first_line
from echelon.checkpoint.in_memory.snapshot_wire import SnapshotRefusedError
from echelon.distributed.activity import waiting

#: Errors of a snapshot that must not end training.
TROUBLE = (OSError, MemoryError, SnapshotRefusedError, EchelonError)
#: Seconds that the last snapshot may take after training has ended.
_LAST = 20.0


class Replicator:
    """One thread that runs the job given to ``hand`` for each snapshot; ``wait`` before the next one."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, timeout: float) -> None:
        self._group, self._rank, self._timeout = group, rank, timeout
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._failing: list[int] = []
        self.failure: str | None = None  #: why this rank failed; None if it did not
        self._thread = threading.Thread(target=self._work, name="echelon-copies", daemon=True)
        self._thread.start()

    def hand(self, job: Callable[[], None]) -> None:
        self._done.clear()
        self._jobs.put(job)

    def wait(self) -> list[int]:
        """Wait until the last snapshot is complete on all ranks; return the ranks that failed."""
        with waiting("previous in-memory snapshot"):
            in_time = self._done.wait(self._timeout)
        if not in_time:
            self.failure = f"the other ranks have not confirmed their snapshots for {self._timeout:.0f} s"
            return [self._rank]
        return self._failing

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(_LAST)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except TROUBLE as error:
                self.failure = first_line(error)
            self._failing = self._vote()
            self._done.set()
            del job

    def _vote(self) -> list[int]:
        own = self.failure is None
        if self._group is None:
            return [] if own else [self._rank]
        try:
            found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(found, torch.tensor([int(own)]), group=self._group)  # not counted as a training wait
        except RuntimeError as error:  # a rank is lost; the training thread reports that
            self.failure = self.failure or first_line(error)
            return [self._rank]
        return [rank for rank, vote in enumerate(found) if not int(vote)]
