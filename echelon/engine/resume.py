"""``StateRestorer``: finds the state that training resumes from, restores it and logs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.base.errors import CheckpointError, Damaged
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.engine.checkpointing import CheckpointManager
from echelon.engine.in_memory.checkpointer import MemoryCheckpointer
from echelon.observability.metrics.run_logger import RunLogger

if TYPE_CHECKING:
    from echelon.checkpoint import Stored
    from echelon.engine.parallelize import ParallelModel
    from echelon.parameter_server.worker.session import ParameterServerSession


class StateRestorer:
    """Restores the training state; its methods return the step of the restored state.

    Before the first batch has partitioned a pipeline, only loaders can be restored; the rest waits for ``takes``.
    """

    def __init__(
        self,
        world: World,
        keeper: CheckpointManager,
        served: ParameterServerSession | None,
        memories: MemoryCheckpointer | None,
        voice: RunLogger,
    ) -> None:
        self._world = world
        self._keeper = keeper
        self._served = served
        self._memories = memories
        self._voice = voice
        self._parts: ParallelModel | None = None
        self._waiting: Stored | None = None
        self._put: Stored | None = None

    def takes(self, parts: ParallelModel, step: int) -> int:
        """Set the parallel model and restore state that waited for it; return its step, or ``step`` if none waited."""
        self._parts, waiting = parts, self._waiting
        if waiting is None:
            return step
        if waiting is not self._put:  # the user has named the checkpoint
            return self._restore(waiting, parts)
        if (line := self._damage(waiting)) is not None:
            raise Damaged(f"{line}; remove it, and the same command goes on from the one before it")
        return self._gone_on()

    def load(self, source: str | Path | Stored) -> int:
        if self._parts is not None:
            return self._restore(source, self._parts)
        self._waiting = self._keeper.peek(source)
        return self._waiting.step

    def newest(self, step: int) -> int:
        """Resume from this worker's state on servers, in-memory snapshots, or the newest undamaged checkpoint.

        The result is the step of the restored state, or ``step`` if there is none.
        """
        if self._served is not None and (left := self._served.resumed) is not None:
            step = self._keeper.restore_worker_state(left)
            self._voice.resumed(f"went on after step {step}, where this worker was before it was started again")
            return step
        return self._first_whole(step)

    def _restore(self, source: str | Path | Stored, parts: ParallelModel) -> int:
        return self._announced(self._put_back(source, parts))

    def _put_back(self, source: str | Path | Stored, parts: ParallelModel) -> Stored:
        stored = self._keeper.load(source, loaders=self._waiting is None, served=self._served)
        self._waiting = None
        if parts.shards is not None:
            parts.shards.refresh()
        return stored

    def _announced(self, stored: Stored) -> int:
        """Log what training resumes from and return its step."""
        if self._keeper.average is not None and stored.facts.get("ema") is None:
            self._voice.say("ema: the checkpoint has no averaged weights; the average begins again from its weights")
        self._voice.resumed(f"resumed from {stored.title}, after step {stored.step}{stored.origin}")
        if stored.world_size != self._world.size:
            ranks = f"saved by {stored.world_size} ranks, resumed by {self._world.size}"
            self._voice.say(f"{ranks}: random streams start afresh")
        for line in self._keeper.given.overruled(stored.facts.get("given")):
            self._voice.say(line, "warning")
        return stored.step

    def _first_whole(self, step: int) -> int:
        """Restore the newest undamaged state and return its step, or ``step`` if there is no state.

        Ranks read different parts of a checkpoint; if one rank finds it damaged, no rank resumes from it. Raises
        ``CheckpointError`` if all are damaged.
        """
        line: str | None = None
        for source in self._sources():
            if (line := self._damage(source)) is None:
                return self._gone_on()
            self._voice.say(f"{line}; looking at the one before it")
        if line is not None:
            count = len(self._kept())
            which = (
                f"none of {count} checkpoints is whole"
                if count
                else "no copy in memory is good, and there is no checkpoint"
            )
            raise CheckpointError(f"{which}: {line}")
        return step

    def _sources(self) -> Iterator[Path | Stored]:
        """Yield in-memory snapshots, then checkpoints, each newest first."""
        for skipped in itertools.count():
            copies = self._memories.newest(skipped) if self._memories is not None else None
            if copies is None:
                break
            yield copies
        yield from self._kept()

    def _kept(self) -> list[Path]:
        """Return the run's checkpoints as rank 0 lists them, because another job may write there at the same time."""
        paths = self._keeper.kept()
        if self._world.control is None:
            return paths
        return [Path(path) for path in gather_json([str(path) for path in paths], self._world.control)[0]]

    def _damage(self, source: Path | Stored) -> str | None:
        """Restore ``source`` on all ranks; return the reason why a rank cannot resume from it, None if all can."""
        mine = self._own_damage(source)
        found = [mine] if self._world.control is None else gather_json(mine, self._world.control)
        return next(filter(None, found), None)

    def _own_damage(self, source: Path | Stored) -> str | None:
        try:
            if self._parts is None:
                if self._world.rank == 0 and isinstance(source, Path):  # when it is read, no other can be chosen
                    self._keeper.verify(source)
                self._waiting = self._put = self._keeper.peek(source)
            else:
                self._put = self._put_back(source, self._parts)
                self._keeper.raise_if_not_finite(self._put)
        except CheckpointError as error:
            has_gone = isinstance(source, Path) and not source.exists()  # removed after it was listed
            if not has_gone and not isinstance(error, Damaged):
                raise
            return str(error)
        return None

    def _gone_on(self) -> int:
        """Return the step of the state that was restored last, and log it."""
        assert self._put is not None
        return self._put.step if self._parts is None else self._announced(self._put)
