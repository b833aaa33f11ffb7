"""One life of a job that saves checkpoints: real writers of several ranks on one simulated file system.

make simulate RUN="checkpoint_life.py SEED"      prints the trace of a life
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from interposition import alive, simulated_system
from scheduler import Scheduler, SimulatedProcess, SimulationError, Task, active
from server_life import TraceStream
from simulated_disk import DiskFaults, SimulatedDisk
from simulated_threading import SimulatedRLock

from echelon.base.errors import CheckpointError
from echelon.checkpoint import directory as layout
from echelon.checkpoint import writer
from echelon.checkpoint.rank_agreement import SavePeers
from echelon.checkpoint.reader import Stored

#: Globals of which each process has its own.
PER_PROCESS = ((layout, "_renaming", SimulatedRLock), (layout, "under_way", set))
#: Sizes of the tensors; all ranks hold them, and each writes a share.
SIZES = (1, 7, 40, 300, 3000)
ROUND_LIMIT = 300.0


@dataclass
class CheckpointResult:
    """The outcome of a life. ``violations`` are the laws that it broke."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    saves: int = 0
    operations: int = 0
    trace: list[str] = field(default_factory=list)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Return the state after a step: every entry of every step is another number."""
    return {f"w{n}": torch.arange(n, dtype=torch.float32) + 10_000.0 * step for n in SIZES}


class SimulatedGroup:
    """The connection of the ranks of one round; it breaks for all when a rank dies."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.members: list[SimulatedProcess] = []
        self._messages: dict[tuple[str, int], dict[int, Any]] = {}
        self._waiting: list[tuple[Task, int]] = []

    def exchange(self, kind: str, number: int, rank: int, message: Any) -> dict[int, Any]:
        """Give this rank's message, and wait for those of all ranks."""
        there = self._messages.setdefault((kind, number), {})
        there[rank] = message
        active().wake(self._waiting)
        while len(there) < self.ranks:
            if any(member.dead for member in self.members):
                raise RuntimeError("Connection closed by peer")
            active().block(self._waiting, 0.5)
        active().sleep(0.001)
        return there


class SimulatedPeers(SavePeers):
    """The agreement of ranks over a simulated group."""

    def __init__(self, rank: int, world_size: int, group: Any, timeout: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = group
        self._number = 0

    def close(self) -> None:
        """Do nothing: the group ends with its processes."""

    def _gather(self, message: Any) -> list[Any]:
        self._number += 1
        there = self._group.exchange("gather", self._number, self.rank, message)
        return [there[rank] for rank in range(self.world_size)]

    def _broadcast(self, message: Any) -> Any:
        return self._group.exchange("broadcast", self._number, self.rank, message)[0]


class CheckpointLife:
    """The director of one life: rounds of ranks that load the newest checkpoint, train, save, and die."""

    def __init__(self, seed: int, root: Path) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(self.rng, restless=0.3)
        self.disk = SimulatedDisk(root, self.scheduler, self.rng)
        self.disk.slowness = self.rng.choice((0.1, 0.5))
        self.disk.on_death = self._kill
        self.ranks = self.rng.randint(1, 4)
        self.keep = self.rng.choice((None, 1, 2, 3))
        self.asynchronous = self.rng.random() < 0.5
        self.home = root / "host" / "checkpoints"
        self.home.parent.mkdir()
        self.processes: list[SimulatedProcess] = []
        self.result = CheckpointResult(seed, trace=self.scheduler.trace)
        self.saved = -1  # the newest step of which a rank knows that it is complete
        self.position = 0
        self.errors: list[BaseException] = []
        self._finished = 0

    def run(self) -> CheckpointResult:
        printed = TraceStream(self.scheduler)
        with (
            contextlib.redirect_stderr(printed),
            contextlib.redirect_stdout(printed),
            alive(self.scheduler, self.disk, *PER_PROCESS),
        ):
            try:
                for number in range(self.rng.randint(2, 7)):
                    self._round(number)
                self._round(99, faultless=True)
            except AssertionError as error:
                self.result.violations.append(str(error))
                self.scheduler.trace += self.scheduler.stacks(self.processes)
            finally:
                self.scheduler.finish(self.processes, self._kill)
        self.result.operations = self.disk.operations
        return self.result

    def _round(self, number: int, faultless: bool = False) -> None:
        """Let ranks train from the newest checkpoint until the round's steps are done or a rank has failed."""
        self._finished, self.errors = 0, []
        group = SimulatedGroup(self.ranks)
        steps = self.rng.randint(1, 6)
        for rank in range(self.ranks):
            process = SimulatedProcess(f"rank {rank}", "host", pid=1000 + len(self.processes))
            self.processes.append(process)
            group.members.append(process)
            self.scheduler.spawn(process, self._main(process, group, rank, steps), "main")
        if not faultless:
            self._bring_fault(group)
        until = self.scheduler.now + ROUND_LIMIT
        while self._finished < self.ranks and not any(process.dead for process in group.members):
            self.scheduler.sleep(0.2)
            if self.scheduler.now > until:
                raise SimulationError(f"round {number} has not ended after {ROUND_LIMIT:g} s")
        if faultless and (self.errors or self._finished < self.ranks):
            raise SimulationError(f"a round without faults failed: {self.errors}")
        for process in group.members:
            self._kill(process)
        if self.result.faults["power cut"] and self._power_is_due:
            self.disk.cut_power("host")
            self._power_is_due = False
        self._check_directory(faultless)

    _power_is_due = False

    def _main(self, process: SimulatedProcess, group: SimulatedGroup, rank: int, steps: int) -> Any:
        def train() -> None:
            peers = writer.Writer(
                self.home, keep=self.keep, asynchronous=self.asynchronous, rank=rank, world_size=self.ranks,
                group=group, saved=self._note_saved,
            )  # fmt: skip
            first = self._load()
            for step in range(first + 1, first + 1 + steps):
                active().sleep(self.rng.random() * 0.05)
                peers.save(step, tensors_of(step), {"step": step})
            peers.close()

        def run() -> None:
            try:
                train()
            except CheckpointError as error:
                self.errors.append(error)
                self.scheduler.log(f"ends: {error}")
            self._finished += 1

        return run

    def _load(self) -> int:
        """Return the step of the newest checkpoint, after comparing it with the state of that step."""
        newest = layout.latest(self.home)
        if newest is None:
            return 0
        stored = Stored(newest)
        for name, value in tensors_of(stored.step).items():
            if not torch.equal(stored.read(name), value):
                raise SimulationError(f"{newest.name} holds another '{name}' than was saved")
        return stored.step

    def _note_saved(self, path: Path) -> None:
        step = int(path.name.removeprefix("step-"))
        if step > self.saved:
            self.result.saves += 1
        self.saved = max(self.saved, step)

    # ---- faults ----

    def _kill(self, process: SimulatedProcess) -> None:
        if not process.dead:
            self.scheduler.kill(process)
            self.disk.release(process)

    def _bring_fault(self, group: SimulatedGroup) -> None:
        name = self.rng.choice(
            ("kill", "die at a disk operation", "disk error", "disk full", "power cut", "late ranks")
        )
        self.result.faults[name] += 1
        self.scheduler.log(f"fault: {name}")
        process = self.rng.choice(group.members)
        faults = self.disk.faults.setdefault(process, DiskFaults())
        if name == "late ranks":
            process.stopped = True
            self.scheduler.sleep(2.0)
            process.stopped = False
        elif name in ("kill", "power cut"):
            self._power_is_due = name == "power cut"
            self.scheduler.sleep(self.rng.expovariate(1 / 0.15))
            for member in group.members if self._power_is_due else [process]:
                self._kill(member)
        elif name == "die at a disk operation":
            faults.die_at = self.rng.randint(1, 60)
        elif name == "disk error":
            faults.fail_at, faults.fail_count = self.rng.randint(1, 50), self.rng.choice((1, 1, 3))
            faults.code = self.rng.choice((errno.EIO, errno.ENOSPC))
        else:
            self.scheduler.sleep(self.rng.random() * 0.2)
            faults.full = True

    # ---- laws ----

    def _check_directory(self, faultless: bool) -> None:
        """Check that every checkpoint is complete with the bits of its step, and that the newest saved one is there."""
        found = layout.complete(self.home)
        for step, path in found.items():
            try:
                stored = Stored(path)
                stored.verify()
                wrong = [name for name, value in tensors_of(step).items() if not torch.equal(stored.read(name), value)]
            except (CheckpointError, OSError) as error:
                raise SimulationError(f"{path.name} looks complete and is not: {error}") from error
            if wrong or stored.step != step:
                raise SimulationError(f"{path.name} holds other values of {wrong}")
        if max(found, default=-1) < self.saved:
            raise SimulationError(f"step {self.saved} was saved, and {sorted(found)} are there")
        if faultless and (self.keep is not None and len(found) > self.keep):
            raise SimulationError(f"keep={self.keep}, and {sorted(found)} are there")
        left = [path.name for path in self.home.iterdir() if path.name.startswith(".step-")] if faultless else []
        if left:
            raise SimulationError(f"a round without faults leaves {left}")


def simulated_savers() -> contextlib.AbstractContextManager[None]:
    """Put the simulated system and agreement in place inside the context, for any number of lives."""
    return simulated_system((writer, "SavePeers", writer.SavePeers, SimulatedPeers))


def live(seed: int) -> CheckpointResult:
    """Run one life inside ``simulated_savers``."""
    base = Path(tempfile.mkdtemp(prefix="life-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (base / "disks").mkdir()
    try:
        return CheckpointLife(seed, base / "disks").run()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    with simulated_savers():
        result = live(int(sys.argv[1]))
    print("\n".join(result.trace))
    print(dict(result.faults), f"{result.saves} saves, {result.operations} operations")
    print("\n".join(result.violations) or "all laws hold")


if __name__ == "__main__":
    main()
