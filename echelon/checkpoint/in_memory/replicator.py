"""In the background: a copy goes where a lost host does not take it along, and all ranks hear whether all of them did.

A copy may replace the one before the last only when the last is whole on every rank. So after each copy the ranks vote,
on connections of their own, while the next step computes; a rank that cannot go on says so there, and all stop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from echelon.base.errors import EchelonError
from echelon.checkpoint.in_memory.snapshot_wire import SnapshotRefusedError
from echelon.distributed.activity import waiting

#: What may go wrong with a copy, and must not end training.
TROUBLE = (OSError, MemoryError, SnapshotRefusedError, EchelonError)
#: Seconds that the last copy may take when training has ended.
_LAST = 20.0


class Replicator:
    """One thread. ``hand`` it what is to be done for a copy, ``wait`` before the next."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, timeout: float) -> None:
        self._group, self._rank, self._timeout = group, rank, timeout
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._failing: list[int] = []
        self.failure: str | None = None  #: why this rank cannot go on
        self._thread = threading.Thread(target=self._work, name="echelon-copies", daemon=True)
        self._thread.start()

    def hand(self, job: Callable[[], None]) -> None:
        self._done.clear()
        self._jobs.put(job)

    def wait(self) -> list[int]:
        """Until the last copy is safe everywhere; which ranks say that theirs is not."""
        with waiting("copies of the step before"):
            in_time = self._done.wait(self._timeout)
        if not in_time:
            self.failure = f"the other ranks have not said for {self._timeout:.0f} s that theirs is whole"
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
                self.failure = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._failing = self._vote()
            self._done.set()
            del job

    def _vote(self) -> list[int]:
        mine = self.failure is None
        if self._group is None:
            return [] if mine else [self._rank]
        try:
            found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(found, torch.tensor([int(mine)]), group=self._group)  # not in the training thread's name
        except RuntimeError as error:  # a rank is gone; training itself will say so
            self.failure = self.failure or str(error).splitlines()[0]
            return [self._rank]
        return [rank for rank, vote in enumerate(found) if not int(vote)]
