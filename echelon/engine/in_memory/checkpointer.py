"""Memories: an engine's copies in the memories of its hosts, found when it begins and made after its steps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.distributed.world import World
from echelon.engine.checkpointing import CheckpointManager
from echelon.engine.consistency import ConsistencyChecker

if TYPE_CHECKING:  # what makes copies and reads them is imported by a run that does
    from echelon.checkpoint import Stored
    from echelon.engine.in_memory.snapshot_writer import SnapshotWriter


class MemoryCheckpointer:
    """``statistics``: whether replicas have batch-norm statistics of their own."""

    def __init__(
        self,
        where: SnapshotHosts,
        world: World,
        keeper: CheckpointManager,
        company: ConsistencyChecker,
        statistics: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.where, self._world, self._keeper, self._company = where, world, keeper, company
        self._statistics, self._say = statistics, say
        self.copies: SnapshotWriter | None = None  #: from the first step on

    @staticmethod
    def find(
        world: World,
        keeper: CheckpointManager,
        company: ConsistencyChecker,
        statistics: Callable[[], bool],
        say: Callable[[str], None],
    ) -> MemoryCheckpointer | None:
        """Where the launcher was asked for copies."""
        where = SnapshotHosts.for_next_engine()
        return None if where is None else MemoryCheckpointer(where, world, keeper, company, statistics, say)

    def newest(self, skipped: int = 0) -> Stored | None:
        """The newest copies that an earlier round has left, of no earlier step than the checkpoint.

        skipped: as many newer ones are passed over
        """
        if self.where.round == 0:
            return None
        from echelon.engine.in_memory.memory_snapshot import newest

        with self._company.explained():
            return newest(self.where, self._keeper.newest_step(), self._world.control, self._world.rank, skipped)

    def after(self, step: int, at_once: bool = False) -> None:
        """Copy the state, if it is time after ``step``, which all ranks have done; ``at_once``: in any case."""
        if self.copies is None:
            self.copies = self._open()
        with self._company.explained():
            self.copies.after(step, at_once)

    def hold(self) -> None:
        """Before an update: what it changes must have been read."""
        if self.copies is not None:
            self.copies.hold()

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()

    def _open(self) -> SnapshotWriter:
        from echelon.engine.in_memory.snapshot_writer import SnapshotWriter

        limit = timedelta(seconds=self._world.timeout)
        return SnapshotWriter(
            *(self.where, self._world, self._keeper, lambda: self._company.groups.new(backend="gloo", timeout=limit)),
            *(self._statistics, self._say),
        )
