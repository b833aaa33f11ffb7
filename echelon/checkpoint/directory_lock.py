"""A lock on a checkpoint directory: one job at a time writes there. Readers do not take it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from echelon.base.directory_lock import LockUse, claim, release
from echelon.base.environment import RESTART_COUNT
from echelon.base.errors import CheckpointError
from echelon.distributed.collectives import gather_json

CHECKPOINTS = LockUse(
    ".writer",
    "checkpoint",
    "writes checkpoints there; end that job (in a notebook: engine.close()), or choose another directory",
    leased=True,
)


class DirectoryLocks:
    """The directories that an engine writes into. All ranks call together; the rank that ``writes`` holds the locks."""

    def __init__(self, group: dist.ProcessGroup | None, writes: bool, say: Callable[[str], None]) -> None:
        self._group, self._writes, self._say = group, writes, say
        self._taken: set[Path] = set()

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, directory: Path) -> None:
        """Lock ``directory`` against other jobs; raise ``CheckpointError`` on all ranks if another job has the lock."""
        if directory in self._taken:
            return
        restarted = os.environ.get(RESTART_COUNT, "0") != "0"
        refused = claim(directory, CHECKPOINTS, restarted, self._say) if self._writes else None
        if self._group is not None:
            refused = next(filter(None, gather_json(refused, self._group)), None)
        if refused is not None:
            raise CheckpointError(refused)
        self._taken.add(directory)

    def release(self) -> None:
        for directory in self._taken if self._writes else ():
            release(directory, CHECKPOINTS)
        self._taken.clear()
