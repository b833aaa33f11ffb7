"""One life of a job with parameter servers: a seed gives its shape, its faults and their order.

make simulate RUN="server_life.py SEED"      prints the trace of a life
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from apply_faults import ApplyFaults
from interposition import alive, simulated_system
from kept_shard import state_of
from push_history import find_violations
from resized_checkpoint import find_difference
from scheduler import Scheduler, SimulatedProcess, SimulationError, TraceStream
from second_process import connect_locks, simulated_flock, start_second
from simulated_disk import DiskFaults, SimulatedDisk
from simulated_job import FewBuckets, JobShape, SimulatedJob, is_named
from simulated_network import SimulatedConnection, SimulatedNetwork, SimulatedPort, connect_network

from echelon.base import directory_lock
from echelon.parameter_server.persistence import persistence, snapshot
from echelon.parameter_server.protocol import channel
from echelon.parameter_server.server import process as server_process
from echelon.parameter_server.server import state as server_state
from echelon.parameter_server.server import worker_arrivals

#: Simulated seconds in which a job must finish after its last fault, and in which it must end when its workers leave.
PATIENCE, FAREWELL = 600.0, 120.0
TICK = 0.25
#: Globals of which each process has its own.
PER_PROCESS = ((directory_lock, "_held", dict),)
#: Faults after which no process may end by an error.
PAINLESS = {"kill a server", "kill a worker", "die at a disk operation", "restart all", "clock jump", "audit"}
#: A fault of some lives; see ``second_process.py``.
SECOND = "start a second process"
#: Words of an error after which the whole job has to be started again.
START_AGAIN = "start the job again"
#: Sentences of the errors with which a job may end that has really lost state.
LOSSES = (
    "the pushes between them are missing", "has restarted without its state", "lost that worker's state",
    "is damaged", "is truncated", "does not go on where", "has no state of worker", "it has to join",
    "wants the weights for step", "push 0 came", "its last one here is", "has not sent the initial values",
    "has lost its state", "is incomplete",
)  # fmt: skip


@dataclass
class LifeResult:
    """The outcome of a life. ``violations`` are the laws that it broke."""

    seed: int
    shape: JobShape
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    refused: bool = False
    operations: int = 0
    switches: int = 0
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)


def draw_shape(rng: random.Random) -> JobShape:
    servers = rng.choice((1, 2, 2, 3))
    return JobShape(
        mode=rng.choice(("sync", "async")),
        servers=servers,
        workers=rng.choice((1, 2, 2, 3)),
        steps=rng.randint(4, 14),
        replica=servers > 1 and rng.random() < 0.5,
        fsync=rng.random() < 0.3,
        snapshot_every=rng.choice((0.15, 0.5, 2.0)),
        journal_limit=rng.choice((1, 2000, 1 << 30)),
        patience=rng.choice((8.0, 30.0)),
    )


class ServerLife:
    """The director of one life: starts the job, brings faults upon it, restarts what died, and checks the laws."""

    def __init__(self, seed: int, root: Path, shape: JobShape | None = None, only: tuple[str, ...] = ()) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or draw_shape(self.rng)
        if shape is None and random.Random(seed + (1 << 41)).random() < 0.3:  # a day, and clocks may jump by two
            self.shape = replace(self.shape, expire_seconds=86400.0)
        self.scheduler = Scheduler(self.rng, restless=self.rng.choice((0.05, 0.3)))
        self.disk = SimulatedDisk(root, self.scheduler, self.rng)
        self.network = SimulatedNetwork(self.scheduler, self.rng)
        self.job = SimulatedJob(self.shape, self.scheduler, self.disk, self.network, self.rng, root)
        self.apply_faults = ApplyFaults(self.rng)
        self.result = LifeResult(seed, self.shape, trace=self.scheduler.trace)
        self._seen = 0  # endings of processes
        self._restart_at: dict[tuple[str, int], float] = {}
        self._lossy = False  # state is lost for good: the job may end by a named error
        self._unsynced = False  # ... in a power cut, which may lose what was never synced without a word
        self._hurt: set[int] = set()  # servers whose disk was lost or without power
        self._on_replica: set[int] = set()  # ... and whose state was whole in the replica alone
        self.disk.slowness = self.rng.choice((0.02, 0.2, 0.5))
        chosen = self.rng.sample(sorted(self._nemeses()), self.rng.randint(1, 4))
        self.chosen = list(only) or [*chosen, "kill a server", "die at a disk operation"]
        self._draw_more(random.Random(seed + (1 << 40)), only)

    def _draw_more(self, rng: random.Random, only: tuple[str, ...]) -> None:
        """Draw what was added later, apart from the rest, so that seeds keep their lives."""
        if not only and rng.random() < 0.2:
            self.chosen.append(SECOND)
        self.has_locks = SECOND not in self.chosen or rng.random() < 0.5
        counts = [count for count in (1, 2, 3, 4) if count != self.shape.servers]
        self._other_count = rng.choice(counts) if rng.random() < 0.2 else 0

    def _nemeses(self) -> dict[str, Callable[[], None]]:
        """Return the faults, each with the function that brings it about."""
        return {
            "kill a server": self._kill_server,
            "kill a worker": self._kill_worker,
            "die at a disk operation": self._die_at_operation,
            "disk error": self._disk_error,
            "disk full": self._disk_full,
            "exception in apply": self._fail_apply,
            "cut a link": self._cut_link,
            "stop a process": self._stop_process,
            "clock jump": self._jump_clock,
            "power cut": self._cut_power,
            "lose a disk": self._lose_disk,
            "restart all": self._kill_all,
            "audit": self._audit_some,
        }

    def _all_nemeses(self) -> dict[str, Callable[[], None]]:
        return self._nemeses() | {SECOND: lambda: start_second(self)}

    # ---- the life ----

    def run(self) -> LifeResult:
        connect_network(self.network)
        connect_locks(self)
        try:
            with self._under_simulation():
                self._live()
        except AssertionError as error:
            self.result.violations.append(str(error))
        finally:
            connect_network(None)
            connect_locks(None)
        self.result.operations, self.result.switches = self.disk.operations, self.scheduler.switches
        self.result.seconds = self.scheduler.now
        return self.result

    @contextlib.contextmanager
    def _under_simulation(self) -> Iterator[None]:
        printed = TraceStream(self.scheduler)
        with (
            contextlib.redirect_stderr(printed),
            contextlib.redirect_stdout(printed),
            alive(self.scheduler, self.disk, *PER_PROCESS),
            self.apply_faults,
        ):
            try:
                yield
            except AssertionError:
                self.scheduler.trace += self._describe()
                raise
            finally:
                self.scheduler.finish(self.job.processes, self.job.kill)

    def _describe(self) -> list[str]:
        """Return what every process does, for the trace of a life that broke a law."""
        lines = self.scheduler.stacks(self.job.running())
        for server in range(self.shape.servers):
            if (shard := self.job.shard(server)) is not None:
                members = shard.members.facts()
                lines.append(f"server {server}: lsn {shard.lsn}, version {shard.version}, {shard.broken} {members}")
        return lines

    def _live(self) -> None:
        self.network.breaks, self.network.late = self.rng.choice(((0.0, 0.0), (0.01, 0.02), (0.05, 0.05)))
        for server in range(self.shape.servers):
            self.job.start_server(server)
        for worker in range(self.shape.workers):
            self.job.start_worker(worker)
        for _ in range(self.rng.randint(2, 12)):
            self.rest(self.rng.expovariate(1 / 0.5))
            name = self.rng.choice(self.chosen)
            self.scheduler.log(f"fault: {name}")
            self.result.faults[name] += 1
            self._all_nemeses()[name]()
        self._heal()
        until = self.scheduler.now + PATIENCE
        while not self._is_finished():
            self.rest(1.0)
            if self._is_refused():
                self.result.refused = True
                return
            if self.scheduler.now > until:
                raise SimulationError(f"the job has not finished {PATIENCE:g} s after its last fault")
        self._check_laws()
        self._end()

    def rest(self, seconds: float) -> None:
        """Let the job go on; restart processes that died, after a while."""
        until = self.scheduler.now + seconds
        while self.scheduler.now < until:
            self.scheduler.sleep(min(TICK, until - self.scheduler.now))
            self._supervise()

    def _supervise(self) -> None:
        for kind, processes in (("server", self.job.servers), ("worker", self.job.workers)):
            for index, process in enumerate(processes):
                if process is None or not process.dead:
                    continue
                if (kind, index) not in self._restart_at:
                    self._restart_at[kind, index] = self.scheduler.now + self._restart_delay(kind)
                if self.scheduler.now >= self._restart_at[kind, index]:
                    del self._restart_at[kind, index]
                    (self.job.start_server if kind == "server" else self.job.start_worker)(index)
        for name, ending in self.job.endings[self._seen :]:
            self._seen += 1
            if not self._is_expected(ending):
                raise SimulationError(f"{name} ended with {type(ending).__name__}: {ending}")
            if START_AGAIN in str(ending):
                self._kill_all()

    def _restart_delay(self, kind: str) -> float:
        if kind == "server" or self.rng.random() < 0.8:
            return self.rng.choice((0.1, 1.0, 4.0))
        self.result.faults["a worker comes late"] += 1
        return 15.0

    def _is_expected(self, ending: BaseException) -> bool:
        """Return True if an error has a cause among the life's faults: a killed process comes back without any."""
        has_cause = not set(self.result.faults) <= PAINLESS
        return has_cause and (is_named(ending) or self.apply_faults.used > 0)

    def _heal(self) -> None:
        self.scheduler.log("faults end")
        self.disk.faults.clear()
        self.apply_faults.armed.clear()
        self.network.breaks = self.network.late = 0.0
        self.network.cut.clear()
        for process in self.job.counted_as_lost():
            self.job.kill(process)
        for process in self.job.processes:
            process.stopped = False
        self._endings = len(self.job.endings)

    def _is_finished(self) -> bool:
        servers = all(self.job.shard(server) is not None for server in range(self.shape.servers))
        workers = not any(process is None or process.dead for process in self.job.workers)
        return servers and workers and len(self.job.finished) == self.shape.workers

    def _is_refused(self) -> bool:
        """Return True if a job that has lost state says so again and again."""
        later = [str(error) for _, error in self.job.endings[self._endings :]]
        return self._lossy and sum(any(loss in line for loss in LOSSES) for line in later) >= 4

    def _is_excused(self) -> bool:
        """Return True if state was really lost, and an error said so or the documents do."""
        unasked = any("cannot ask for the replica" in line for line in self.scheduler.trace)
        if self._unsynced or (unasked and self.result.faults["power cut"] and not self.shape.fsync):
            return True
        return self._lossy and any(any(loss in str(e) for loss in LOSSES) for _, e in self.job.endings)

    # ---- laws ----

    def _check_laws(self) -> None:
        job = self.job
        shards = [job.shard(server) for server in range(self.shape.servers)]
        views = [job.rows(shard, server) for server, shard in enumerate(shards) if shard is not None]
        own, shared, dense = (list(part) for part in zip(*views, strict=True))
        found = find_violations(job.history, own, shared, dense, self.shape.steps)
        if self.shape.mode == "sync" and len({shard.version for shard in shards if shard is not None}) > 1:
            found.append(f"versions differ: {[shard.version for shard in shards if shard is not None]}")
        self.result.violations += [] if self._is_excused() else [*found, *job.misreadings]
        for server in range(self.shape.servers):
            self._audit(server)
        if self._other_count and (found := find_difference(job, Path(self.disk.root, "checkpoint"), self._other_count)):
            raise SimulationError(found)

    def _audit(self, server: int) -> None:
        """Compare a live server, bit by bit, with one that a fresh process restores from its files."""
        shard = self.job.shard(server)
        if shard is None or shard.broken or shard.persistence is None:
            return
        if not shard.lock.acquire(blocking=False):  # a thread that waits for the replica may hold it for long
            return
        try:
            live, fresh = state_of(shard), state_of(self.job.restored(server))
        finally:
            shard.lock.release()
        differing = [name for name in {*live, *fresh} if live.get(name) != fresh.get(name)]
        if differing:
            raise SimulationError(f"server {server}: a fresh process restores other {', '.join(sorted(differing))}")

    def _end(self) -> None:
        """Let the workers leave; then all processes must end by themselves."""
        self.job.over = True
        until = self.scheduler.now + FAREWELL
        while running := self.job.running():
            self.scheduler.sleep(TICK)
            if self.scheduler.now > until:
                raise SimulationError(f"{running} still run {FAREWELL:g} s after the job's end")
        ended = [*self.job.servers, *self.job.workers]
        failed = [f"{p}: {p.ending}" for p in ended if p is not None and p.ending != 0]
        if failed:
            raise SimulationError(f"the job's end failed: {failed}")

    # ---- faults ----

    def _some(self, processes: list[SimulatedProcess | None]) -> SimulatedProcess | None:
        alive_ones = [process for process in processes if process is not None and not process.dead]
        return self.rng.choice(alive_ones) if alive_ones else None

    def _kill_server(self) -> None:
        if process := self._some(self.job.servers):
            self.job.kill(process)

    def _kill_worker(self) -> None:
        if process := self._some(self.job.workers):
            self.job.kill(process)

    def _kill_all(self) -> None:
        for process in self.job.running():
            self.job.kill(process)

    def _faults_of(self, process: SimulatedProcess) -> DiskFaults:
        return self.disk.faults.setdefault(process, DiskFaults())

    def _die_at_operation(self) -> None:
        if process := self._some(self.job.servers):
            self._faults_of(process).die_at = self.disk.counts.get(process, 0) + self.rng.randint(1, 40)

    def _disk_error(self) -> None:
        if process := self._some(self.job.servers):
            faults = self._faults_of(process)
            faults.fail_at = self.disk.counts.get(process, 0) + self.rng.randint(1, 30)
            faults.fail_count = self.rng.choice((1, 1, 2, 5))
            faults.code = self.rng.choice((errno.EIO, errno.ENOSPC))

    def _disk_full(self) -> None:
        if process := self._some(self.job.servers):
            faults = self._faults_of(process)
            faults.full = True
            self.rest(self.rng.choice((0.5, 3.0)))
            faults.full = False

    def _fail_apply(self) -> None:
        if process := self._some(self.job.servers):
            self.apply_faults.arm(process)

    def _cut_link(self) -> None:
        hosts = [f"server-{i}" for i in range(self.shape.servers)] + [f"worker-{i}" for i in range(self.shape.workers)]
        one, other = self.rng.choice(hosts), self.rng.choice(hosts)
        pairs = {(one, other), (other, one)} if self.rng.random() < 0.5 else {(one, other)}
        self.network.cut |= {pair for pair in pairs if one != other}
        self.rest(self.rng.choice((0.5, 5.0, 20.0)))
        self.network.cut.clear()

    def _stop_process(self) -> None:
        if process := self._some([*self.job.servers, *self.job.workers]):
            process.stopped = True
            self.rest(self.rng.choice((0.5, 5.0, 20.0)))
            process.stopped = False

    def _jump_clock(self) -> None:
        if process := self._some(self.job.servers):
            process.clock_offset += self.rng.choice((-172800.0, -60.0, 60.0, 172800.0))

    def _cut_power(self) -> None:
        """Cut the power of one server's host, or of all."""
        hosts = range(self.shape.servers)
        for server in hosts if self.rng.random() < 0.3 else [self.rng.choice(hosts)]:
            self._hurt_disk(server, is_safe=self.shape.fsync)
            self.disk.cut_power(f"server-{server}")
        self._unsynced = self._unsynced or (self._lossy and not self.shape.fsync)

    def _lose_disk(self) -> None:
        server = self.rng.randrange(self.shape.servers)
        self._hurt_disk(server, is_safe=False)
        self.disk.lose(f"server-{server}")

    def _hurt_disk(self, server: int, is_safe: bool) -> None:
        """Kill a server whose disk is about to suffer; note whether its state is somewhere else, whole."""
        process, shard = self.job.servers[server], self.job.shard(server)
        replica = shard.persistence._replica if shard is not None and shard.persistence is not None else None
        neighbour = (server + 1) % self.shape.servers
        is_copied = replica is not None and not replica.behind and neighbour not in self._hurt
        is_only_copy = self.shape.replica and (server - 1) % self.shape.servers in self._on_replica
        self._lossy = self._lossy or is_only_copy or not (is_safe or is_copied)
        self.scheduler.log(
            f"the disk of server {server} suffers; its state is {'safe' if is_safe or is_copied else 'lost'}"
        )
        self._hurt.add(server)
        self._on_replica |= set() if is_safe else {server}
        for zombie in self.job.counted_as_lost():
            self.job.kill(zombie)
        if process is not None:
            self.job.kill(process, silently=self.rng.random() < 0.5)

    def _audit_some(self) -> None:
        self._audit(self.rng.randrange(self.shape.servers))


def simulated_servers() -> contextlib.AbstractContextManager[None]:
    """Put the simulated system and network in place inside the context, for any number of lives."""
    return simulated_system(
        (channel, "ServerConnection", channel.ServerConnection, SimulatedConnection),
        (channel, "explain_missing_tls", channel.explain_missing_tls, lambda *_: None),
        (server_process, "ServerPort", server_process.ServerPort, SimulatedPort),
        (fcntl, "flock", fcntl.flock, simulated_flock),
        (server_state, "ServerStore", server_state.ServerStore, FewBuckets),
        (snapshot, "_TOGETHER", snapshot._TOGETHER, 1),  # buckets are taken one by one, and pushes come between
        (persistence, "AFTER_FAILURE", persistence.AFTER_FAILURE, 0.3),
        (server_process, "LOOK", server_process.LOOK, 0.5),
        (worker_arrivals, "_accepts", worker_arrivals._accepts, lambda _: False),
    )


def live(seed: int, shape: JobShape | None = None, only: tuple[str, ...] = ()) -> LifeResult:
    """Run one life inside ``simulated_servers``."""
    base = Path(tempfile.mkdtemp(prefix="life-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (base / "disks").mkdir()
    try:
        return ServerLife(seed, base / "disks", shape, only).run()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    with simulated_servers():
        result = live(int(sys.argv[1]))
    print("\n".join(result.trace))
    print(result.shape, dict(result.faults), f"{result.operations} operations, {result.switches} switches")
    print("\n".join(result.violations) or ("refused" if result.refused else "all laws hold"))


if __name__ == "__main__":
    main()
