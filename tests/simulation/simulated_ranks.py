"""Ranks as simulated processes: they meet at the store of their round, make steps together, save, fail and hang.

A step is made when every rank of the group has come to it and all their hosts can talk. A rank whose peer has died
fails as one of torch does, with a record that says so. Ranks that can save leave together, after the same step.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler import Killed, SimulatedProcess, Task, active
from simulated_store import StoreTable
from simulated_threading import TimeModule
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from echelon.base.environment import REQUEUE

if TYPE_CHECKING:
    from simulated_launchers import SimulatedLaunchers

#: Seconds that ranks wait for each other at their start.
MEETING = 30.0


@dataclass(eq=False)
class RankGroup:
    """The ranks that meet at one store.

    victims:  ranks that a fault has hit
    """

    table: StoreTable
    generation: int
    world: int
    members: dict[int, SimulatedRank] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    victims: set[int] = field(default_factory=set)
    steps: int = 0
    first_step_at: float = -1.0
    leave_after: int = -1
    finish_after: int = -1
    waiting: list[tuple[Task, int]] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.members) == self.world

    @property
    def hosts(self) -> set[str]:
        return {rank.process.host for rank in self.members.values()}

    def has_lost(self) -> bool:
        """Return True if a member has died, and its peers learn of it."""
        return any(rank.code not in (None, 0, REQUEUE) and not rank.is_silent for rank in self.members.values())


class SimulatedRank:
    """One rank, seen by its launcher as ``subprocess.Popen``."""

    def __init__(self, job: SimulatedLaunchers, env: dict[str, str]) -> None:
        parent = active().current.process
        assert parent is not None
        self.job, self.env, self.launcher = job, env, parent
        self.rank, self.world = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.generation = int(env["TORCHELASTIC_RESTART_COUNT"])
        self.pid = job.next_pid()
        self.process = SimulatedProcess(f"rank {self.rank} of round {self.generation}", parent.host, self.pid)
        self.code: int | None = None
        self.is_silent = self.leaves = self.is_frozen = False
        self.order = ""
        self.group: RankGroup | None = None
        job.scheduler.spawn(self.process, self._run, "main")

    @property
    def proc(self) -> SimulatedRank:
        return self

    def poll(self) -> int | None:
        return self.code

    def send(self, number: int) -> None:
        """Receive a signal."""
        if self.code is not None:
            return
        if number == signal.SIGTERM and (self.leaves or self._mark().exists()):
            self.leaves = True
        elif number == signal.SIGKILL or not self.process.stopped:
            self.end(-number)

    def end(self, code: int, silently: bool = False) -> None:
        """End the process; ``silently``: its peers do not learn of it."""
        if self.code is None:
            self.code, self.is_silent = code, silently
            self.job.scheduler.kill(self.process)
            if self.group is not None and not silently:
                active().wake(self.group.waiting)

    # ---- the process ----

    def _run(self) -> None:
        try:
            code = self._train()
        except Killed:
            raise
        except RuntimeError as error:
            self._record("PeerLost", str(error), secondary=True)
            code = 1
        active().log(f"exits with {code}")
        self.end(code)

    def _train(self) -> int:
        active().sleep(self.job.rng.choice((0.3, 1.0, 3.0)))
        store = self.job.network.connect(self.env["MASTER_ADDR"], int(self.env["MASTER_PORT"]))
        self.group = group = self.job.meet(store.table, self)
        until = active().now + MEETING
        while not group.is_full:
            self._look(group)
            if active().now > until:
                raise RuntimeError(f"{len(group.members)} of {self.world} ranks came")
            active().block(group.waiting, 0.5)
        if self.job.shape.saves:
            self._mark().touch()
        while True:
            active().sleep(self.job.rng.expovariate(1 / 0.4))
            if self._step(group) == group.leave_after:
                active().sleep(self.job.rng.choice((0.05, 1.0)))
                return REQUEUE
            if group.steps >= group.finish_after >= 0:
                active().sleep(self.job.rng.choice((0.0, 1.0)))
                return 0

    def _step(self, group: RankGroup) -> int:
        """Make one step with all the others; return the number of steps."""
        step = group.steps
        group.arrived.add(self.rank)
        while group.steps == step:
            self._look(group)
            if len(group.arrived) == self.world and self.job.can_talk(group):
                self._complete(group)
                break
            active().block(group.waiting, 0.5)
        return group.steps

    def _complete(self, group: RankGroup) -> None:
        self.job.note_step(group)
        group.arrived.clear()
        group.steps += 1
        if group.leave_after < 0 and any(rank.leaves for rank in group.members.values()):
            group.leave_after = group.steps + 1
        if group.finish_after < 0 and self.job.over:
            group.finish_after = group.steps + 1
        active().wake(group.waiting)

    def _look(self, group: RankGroup) -> None:
        """Fail if a peer has died, or if a fault says so."""
        if self.order == "exit":
            self.end(3)
        elif self.order:
            self._record("ValueError", "made up by the simulation", explained=self.order == "explained")
            self.end(1)
        active().pause()
        if group.has_lost():
            active().sleep(self.job.rng.choice((0.02, 0.3)))
            raise RuntimeError("Connection closed by peer")

    def _record(self, kind: str, message: str, secondary: bool = False, explained: bool = False) -> None:
        record = {
            "kind": kind, "message": message, "place": "train.py:1", "ours": explained, "secondary": secondary,
            "traceback": "" if explained else "Traceback", "step": 0, "time": TimeModule.time(),
        }  # fmt: skip
        Path(self.env["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))

    def _mark(self) -> Path:
        return Path(self.env["ECHELON_LEAVE_MARK"]) / f"rank-{self.rank}"


class SimulatedContext(SubprocessContext):
    """The ranks of one host, as torch's agent holds them."""

    def __init__(self, ranks: dict[int, SimulatedRank]) -> None:
        self.subprocess_handlers = ranks  # type: ignore[assignment]

    def pids(self) -> dict[int, int]:
        return {local: rank.pid for local, rank in self.subprocess_handlers.items()}

    def close(self, death_sig: Any = None, timeout: int = 30) -> None:
        """End all ranks by a signal, after ``timeout`` seconds by SIGKILL, as torch does."""
        running = [rank for rank in self.subprocess_handlers.values() if rank.poll() is None]
        for rank in running:
            rank.send(int(death_sig or signal.SIGTERM))
        until = active().now + timeout
        while any(rank.poll() is None for rank in running) and active().now < until:
            active().sleep(0.1)
        for rank in running:
            rank.send(int(signal.SIGKILL))
