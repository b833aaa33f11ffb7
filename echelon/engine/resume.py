"""Finds the state that training resumes from, restores it and logs it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from echelon.base.errors import CheckpointError, Damaged
from echelon.distributed.collectives import gather_json
from echelon.engine.automatic_checkpoints import opened
from echelon.engine.run_context import RunContext

if TYPE_CHECKING:
    from echelon.checkpoint import Stored
    from echelon.engine.checkpointing import CheckpointManager
    from echelon.engine.ema import MovingAverage
    from echelon.engine.parallelize import ParallelModel


class WaitingState(NamedTuple):
    """State that is restored when the model is parallelized; its loaders were restored before.

    by_user: True if the script named the checkpoint; False if the newest undamaged one was chosen
    """

    stored: Stored
    by_user: bool


class StateFinder(ABC):
    """Finds the newest undamaged state of a run. All ranks call its methods together."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._world, self._voice = run, run.world, run.voice
        self._put: Stored | None = None  # the state that was restored last

    def newest(self, step: int) -> int:
        """Restore the newest undamaged state and return its step, or ``step`` if there is no state.

        Ranks read different parts of a checkpoint; if one rank finds it damaged, no rank resumes from it. Raises
        ``CheckpointError`` if all are damaged.
        """
        line: str | None = None
        for source in self._sources():
            if (line := self._damage(source)) is None:
                return self._resumed()
            self._voice.say(f"{line}; trying the one before it")
        if line is not None:
            count = len(self._kept())
            which = (
                f"none of {count} checkpoints is whole"
                if count
                else "no in-memory snapshot is valid, and there is no checkpoint"
            )
            raise CheckpointError(f"{which}: {line}")
        return step

    @abstractmethod
    def _restore(self, source: Path | Stored) -> Stored:
        """Restore ``source`` on this rank. Raises ``CheckpointError``."""

    @abstractmethod
    def _resumed(self) -> int:
        """Return the step of the state that was restored last."""

    def _sources(self) -> Iterator[Path | Stored]:
        """Yield in-memory snapshots, then checkpoints, each newest first."""
        for skipped in itertools.count():
            if (copies := self._snapshot(skipped)) is None:
                break
            yield copies
        yield from self._kept()

    def _snapshot(self, skipped: int) -> Stored | None:
        """Return the newest snapshot of an earlier round, unless the newest checkpoint is of a later step.

        skipped: number of newer snapshots to skip
        """
        where = self._run.snapshots
        if where is None or where.round == 0:
            return None
        from echelon.engine.in_memory.memory_snapshot import newest

        with self._run.checker.explained():
            return newest(where, self._run.checkpoints.newest_step(), self._world.control, self._world.rank, skipped)

    def _kept(self) -> list[Path]:
        """Return the run's checkpoints as rank 0 lists them, because another job may write there at the same time."""
        paths = self._run.checkpoints.kept()
        if self._world.control is None:
            return paths
        return [Path(path) for path in gather_json([str(path) for path in paths], self._world.control)[0]]

    def _damage(self, source: Path | Stored) -> str | None:
        """Restore ``source`` on all ranks; return the reason why a rank cannot resume from it, None if all can."""
        local = self._own_damage(source)
        result = [local] if self._world.control is None else gather_json(local, self._world.control)
        return next(filter(None, result), None)

    def _own_damage(self, source: Path | Stored) -> str | None:
        try:
            self._put = self._restore(source)
        except CheckpointError as error:
            has_gone = isinstance(source, Path) and not source.exists()  # removed after it was listed
            if not has_gone and not isinstance(error, Damaged):
                raise
            return str(error)
        return None


class LoaderRestorer(StateFinder):
    """Restores loaders before the model is parallelized; the rest of the state waits until then."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self.waiting: WaitingState | None = None  #: state that the engine restores when it is created

    def load(self, source: str | Path | Stored) -> int:
        """Restore loaders from a checkpoint that the script has named, and return its step."""
        stored = self._read(source)
        self.waiting = WaitingState(stored, by_user=True)
        return stored.step

    def _restore(self, source: Path | Stored) -> Stored:
        if self._world.rank == 0 and isinstance(source, Path):  # when it is read, no other can be chosen
            opened(source).verify()
        return self._read(source)

    def _read(self, source: str | Path | Stored) -> Stored:
        stored = opened(source)
        self._run.positions.restore(stored)
        return stored

    def _resumed(self) -> int:
        assert self._put is not None
        self.waiting = WaitingState(self._put, by_user=False)
        return self._put.step


class StateRestorer(StateFinder):
    """Restores the whole training state; its methods return the step of the restored state."""

    def __init__(
        self,
        run: RunContext,
        manager: CheckpointManager,
        parts: ParallelModel,
        ema: MovingAverage,
        waiting: WaitingState | None,
    ) -> None:
        super().__init__(run)
        self._manager, self._parts, self._ema, self._waiting = manager, parts, ema, waiting

    def load(self, source: str | Path | Stored) -> int:
        """Restore a checkpoint that the script has named."""
        self._put = self._put_back(source)
        return self._resumed()

    def finish(self, step: int) -> int:
        """Restore state that waited for the model and return its step, or ``step`` if none waited."""
        if (waiting := self._waiting) is None:
            return step
        if waiting.by_user:
            return self.load(waiting.stored)
        if (line := self._damage(waiting.stored)) is not None:
            raise Damaged(f"{line}; remove it, and the same command resumes from the checkpoint before it")
        return self._resumed()

    def newest(self, step: int) -> int:
        """Resume from this worker's state on servers, in-memory snapshots, or the newest undamaged checkpoint.

        The result is the step of the restored state, or ``step`` if there is none.
        """
        if (left := self._run.backend.resumed) is not None:
            step = self._manager.restore_worker_state(left)
            self._voice.resumed(f"resumed after step {step}, the last step of this worker before its restart")
            return step
        return super().newest(step)

    def go_back(self) -> int | None:
        """Restore the newest undamaged checkpoint of this run, and return its step; None if there is none."""
        self._manager.wait()
        for path in self._kept():
            if (line := self._damage(path)) is None:
                return self._resumed()
            self._voice.say(f"{line}; trying the one before it")
        return None

    def _restore(self, source: Path | Stored) -> Stored:
        stored = self._put_back(source)
        self._manager.raise_if_not_finite(stored)
        return stored

    def _put_back(self, source: str | Path | Stored) -> Stored:
        stored = self._manager.load(source, loaders=self._waiting is None)
        self._waiting = None
        if self._parts.shards is not None:
            self._parts.shards.refresh()
        return stored

    def _resumed(self) -> int:
        """Log what training resumes from and return its step."""
        stored = self._put
        assert stored is not None
        if self._ema.averages is not None and stored.facts.get("ema") is None:
            self._voice.say("ema: the checkpoint has no averaged weights; the average begins again from its weights")
        self._voice.resumed(f"resumed from {stored.title}, after step {stored.step}{stored.origin}")
        if stored.world_size != self._world.mesh_size:
            ranks = f"saved by {stored.world_size} ranks, resumed by {self._world.mesh_size}"
            self._voice.say(f"{ranks}: random streams start afresh")
        for line in self._run.positions.overruled(stored):
            self._voice.say(line, "warning")
        return stored.step
