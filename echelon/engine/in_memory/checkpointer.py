"""``MemoryCheckpointer``: takes the in-memory snapshots of an engine after its steps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.distributed.world import World
from echelon.engine.checkpointing import CheckpointManager
from echelon.engine.consistency import ConsistencyChecker

if TYPE_CHECKING:  # only a run with snapshots imports the modules that write and read them
    from echelon.engine.in_memory.snapshot_writer import SnapshotWriter


class MemoryCheckpointer:
    """Takes the in-memory snapshots of one engine.

    where:      launchers that hold the snapshots
    statistics: returns True if each replica has its own batch-norm statistics
    """

    def __init__(
        self,
        where: SnapshotHosts,
        world: World,
        manager: CheckpointManager,
        checker: ConsistencyChecker,
        statistics: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.where = where
        self._world = world
        self._manager = manager
        self._checker = checker
        self._statistics, self._say = statistics, say
        self.copies: SnapshotWriter | None = None  #: None before the first step

    def after(self, step: int, at_once: bool = False) -> None:
        """Take a snapshot after ``step`` on all ranks if one is due; ``at_once``: take it in any case."""
        if self.copies is None:
            self.copies = self._open()
        with self._checker.explained():
            self.copies.after(step, at_once)

    def hold(self) -> None:
        """Make the next update wait until the snapshot has read the tensors that the update changes."""
        if self.copies is not None:
            self.copies.hold()

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()

    def _open(self) -> SnapshotWriter:
        from echelon.engine.in_memory.snapshot_writer import SnapshotWriter

        limit = timedelta(seconds=self._world.timeout)
        return SnapshotWriter(
            self.where,
            self._world,
            self._manager,
            new_group=lambda: self._checker.groups.new(backend="gloo", timeout=limit),
            statistics=self._statistics,
            say=self._say,
        )
