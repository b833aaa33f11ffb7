"""``RankMailbox``: letters of all ranks to rank 0 through the rendezvous store. No rank ever waits to send one."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_numbers = itertools.count()


def next_number() -> int:
    """Return the number of this engine's mailbox: all ranks draw one for each engine, so that they are equal."""
    return next(_numbers)


#: Errors of a store whose server is gone.
STORE_ERRORS = (RuntimeError, OSError, ValueError)
#: Seconds between two looks of ``wait``.
INTERVAL = 0.01


class RankMailbox:
    """The letters of one engine.

    ranks:  ranks that write, including rank 0, which reads
    number: number of the mailbox
    """

    def __init__(self, rank: int, ranks: Sequence[int], number: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"echelon/logged/{number}", store)  # type: ignore[attr-defined]
        self._rank, self._others = rank, [one for one in ranks if one]

    def send(self, subject: str, message: Any) -> None:
        """Send this rank's letter on a subject to rank 0."""
        self._store.set(f"{subject}/{self._rank}", json.dumps(message))

    def missing(self, subject: str) -> list[int]:
        """Return the ranks whose letter has not come."""
        if self._store.check([f"{subject}/{rank}" for rank in self._others]):
            return []
        return [rank for rank in self._others if not self._store.check([f"{subject}/{rank}"])]

    def wait(self, subject: str, seconds: float) -> list[int]:
        """Wait for the letters of all ranks; return the ranks whose letter has not come in that time."""
        end = time.monotonic() + seconds
        while (missing := self.missing(subject)) and time.monotonic() < end:
            time.sleep(INTERVAL)
        return missing

    def read(self, subject: str) -> dict[int, Any]:
        """Return the letters that have come on a subject, by rank, and remove them."""
        gone = set(self.missing(subject))
        letters = {}
        for rank in self._others:
            if rank not in gone:
                letters[rank] = json.loads(self._store.get(f"{subject}/{rank}"))
                self._store.delete_key(f"{subject}/{rank}")
        return letters

    def mark(self, what: str) -> None:
        """Set a mark that all ranks can see."""
        self._store.set(what, "")

    def is_marked(self, what: str) -> bool:
        return bool(self._store.check([what]))
