"""One life of a job of several launchers: a seed gives its shape, its faults and their order.

make simulate RUN="launcher_life.py SEED"      prints the trace of a life
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from interposition import alive
from launcher_laws import find_broken_laws
from scheduler import Scheduler, SimulatedProcess, SimulationError, TraceStream
from simulated_disk import SimulatedDisk
from simulated_launchers import LaunchShape, SimulatedLaunchers, connect_launchers, simulated_launchers
from simulated_ranks import RankGroup, SimulatedRank
from simulated_store import HostNetwork

from echelon.launcher import signals
from echelon.launcher.rendezvous import open_rendezvous

#: Globals of which each process has its own.
PER_PROCESS = ((signals, "_notices", list), (open_rendezvous, "_signs", dict))
TICK = 0.5
#: Simulated seconds, beyond the time limits of the job, until all hosts are in one round, and until all have ended.
SETTLE, FAREWELL = 60.0, 60.0
#: Seconds for which a round must have gone on; longer than any fault takes to be noticed.
STEADY = 10.0


@dataclass
class LaunchResult:
    """The outcome of a life. ``violations`` are the laws that it broke."""

    seed: int
    shape: LaunchShape
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    ended_early: bool = False
    rounds: int = 0
    switches: int = 0
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)


def draw_shape(rng: random.Random) -> LaunchShape:
    most, elastic = rng.choice((1, 2, 2, 3)), rng.random() < 0.6
    least = rng.randint(most // 2 + 1, most) if elastic else most
    hosts = most + (rng.random() < 0.3 and most > 1)
    return LaunchShape(
        hosts=hosts,
        least=least,
        most=most,
        elastic=elastic and most > 1,
        masters=rng.choice((1, hosts)) if most > 1 else 1,
        procs=rng.choice((1, 1, 2)),
        max_restarts=rng.choice((0, 1, 3, 5)),
        saves=rng.random() < 0.6,
        host_timeout=rng.choice((4.0, 8.0)),
    )


class LauncherLife:
    """The director of one life: starts the job, brings faults upon it, starts launchers again, and checks the laws."""

    def __init__(self, seed: int, root: Path, shape: LaunchShape | None = None, only: tuple[str, ...] = ()) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or draw_shape(self.rng)
        self.scheduler = Scheduler(self.rng, restless=self.rng.choice((0.05, 0.3)))
        self.disk = SimulatedDisk(root / "disks", self.scheduler, self.rng)
        self.network = HostNetwork(self.scheduler, self.rng)
        self.job = SimulatedLaunchers(self.shape, self.scheduler, self.network, self.rng, root)
        self.result = LaunchResult(seed, self.shape, trace=self.scheduler.trace)
        self.hurt: dict[str, float] = {}  # hosts that a fault has hit, and when last
        self.done_at, self.is_hit_late = float("inf"), False
        self._restart_at: dict[int, float] = {}
        self._steady: tuple[RankGroup | None, float, int] = (None, 0.0, 0)
        names = sorted(self._nemeses())
        self.chosen = list(only) or self.rng.sample(names, self.rng.randint(1, 4))

    def _nemeses(self) -> dict[str, Callable[[], None]]:
        """Return the faults, each with the function that brings it about."""
        return {
            "kill a rank": lambda: self._hit_rank("kill"),
            "fail a rank": lambda: self._hit_rank("fail"),
            "exit code": lambda: self._hit_rank("exit"),
            "explained failure": lambda: self._hit_rank("explained"),
            "freeze a rank": lambda: self._hit_rank("freeze"),
            "signal a rank": lambda: self._hit_rank("signal"),
            "kill a launcher": self._kill_launcher,
            "signal a launcher": self._signal_launcher,
            "lose a host": self._lose_host,
            "cut a link": self._cut_link,
            "freeze a host": self._freeze_host,
            "slow host": self._slow_host,
            "clock jump": self._jump_clock,
            "kill all": self._kill_all,
        }

    # ---- the life ----

    def run(self) -> LaunchResult:
        connect_launchers(self.job)
        printed = TraceStream(self.scheduler)
        try:
            with (
                contextlib.redirect_stderr(printed),
                contextlib.redirect_stdout(printed),
                alive(self.scheduler, self.disk, *PER_PROCESS),
                self._finishing(),
            ):
                self._live()
        except AssertionError as error:
            self.result.violations.append(str(error))
        finally:
            connect_launchers(None)
        self.result.violations += self.job.violations
        self.result.rounds, self.result.switches = len(self.job.groups), self.scheduler.switches
        self.result.seconds = self.scheduler.now
        return self.result

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            self.scheduler.trace += self.scheduler.stacks(self.job.running())
            raise
        finally:
            processes = [*self.job.processes, *(rank.process for rank in self.job.ranks)]
            self.scheduler.finish(processes, self.scheduler.kill)

    def _live(self) -> None:
        for index in range(self.shape.hosts):
            self.job.start(index)
        for _ in range(self.rng.randint(1, 6)):
            self._rest(self.rng.expovariate(1 / 6.0))
            if self._is_over():
                break
            name = self.rng.choice(self.chosen)
            self.scheduler.log(f"fault: {name}")
            self.result.faults[name] += 1
            self._nemeses()[name]()
        self._heal()
        self._settle()
        self.result.violations += find_broken_laws(self)

    def _settle(self) -> None:
        """Wait until all hosts work in one round, then for the end; or for the end that a fault has caused."""
        limit = SETTLE + self.shape.join_timeout + self.shape.host_timeout
        until = self.scheduler.now + limit
        while not self._is_settled():
            self._rest(TICK)
            if self._is_over():
                self.result.ended_early = True
                return
            if self.scheduler.now > until:
                raise SimulationError(f"{limit:g} s after its last fault the job neither runs on all hosts nor ends")
        self.scheduler.log("all hosts work; the job's work is done")
        self.job.over, self.done_at = True, self.scheduler.now
        if "kill a rank" in self.chosen and self.rng.random() < 0.5:
            self._hit_late()
        until = self.scheduler.now + FAREWELL
        while self.job.running():
            self.scheduler.sleep(TICK)
            if self.scheduler.now > until:
                raise SimulationError(f"{self.job.running()} still run {FAREWELL:g} s after the job's end")

    def _hit_late(self) -> None:
        """Kill a rank while others may have done their work already."""
        self.scheduler.sleep(3.0 * self.rng.random())
        self.is_hit_late = True
        self.result.faults["kill a rank"] += 1
        self._hit_rank("kill")

    def _is_settled(self) -> bool:
        """Return True if the newest round has all the hosts that it can have, and makes steps."""
        group = self.job.groups[-1] if self.job.groups else None
        if group is not self._steady[0]:
            self._steady = (group, self.scheduler.now, group.steps if group is not None else 0)
        _, since, steps = self._steady
        if group is None or self.scheduler.now - since < STEADY or group.steps < steps + 3:
            return False
        is_complete = len(self.job.running()) == self.shape.hosts or self._job_failed()  # one that gave up stays away
        return len(group.hosts) == self.shape.most and is_complete

    def _is_over(self) -> bool:
        """Return True if every launcher has ended by itself."""
        return not self.job.running() and not self._restart_at

    def _rest(self, seconds: float) -> None:
        """Let the job go on; start launchers again that were killed or that left, as a scheduler does."""
        until = self.scheduler.now + seconds
        while self.scheduler.now < until:
            self.scheduler.sleep(min(TICK, until - self.scheduler.now))
            self._supervise()

    def _supervise(self) -> None:
        for index, process in enumerate(self.job.launchers):
            if process is None or not process.dead:
                continue
            if index not in self._restart_at and self._comes_back(process):
                self._restart_at[index] = self.scheduler.now + self.rng.choice((0.5, 2.0, 8.0))
            if self._restart_at.get(index, 1e9) <= self.scheduler.now:
                del self._restart_at[index]
                self.network.dark.discard(process.host)
                self.job.start(index)

    def _comes_back(self, process: SimulatedProcess) -> bool:
        """Return True for a launcher that was killed, or that left a job which others go on with."""
        if process.ending is None:
            return not (self._job_failed() and not self.job.running())
        return bool(process.ending) and not self._job_failed() and bool(self.job.running())

    def _job_failed(self) -> bool:
        """Return True if a launcher has ended with the failure of the whole job."""
        return any(type(ending.error).__name__ == "JobFailed" for ending in self.job.endings)

    def _heal(self) -> None:
        self.scheduler.log("faults end")
        self.network.cut.clear()
        self.network.slow.clear()
        for process in [*self.job.processes, *(rank.process for rank in self.job.ranks)]:
            process.stopped = False
        self._steady = (None, self.scheduler.now, 0)

    # ---- faults ----

    def hurt_near(self, at: float, seconds: float, host: str = "") -> bool:
        """Return True if a fault has hit the host, or any, in the seconds before."""
        return any(at - when < seconds for name, when in self.hurt.items() if host in ("", name))

    def _note_hurt(self, *hosts: str) -> None:
        for host in hosts:
            self.hurt[host] = self.scheduler.now

    def _hit_rank(self, how: str) -> None:
        group = self.job.groups[-1] if self.job.groups else None
        living = [r for r in group.members.values() if r.code is None and not r.is_frozen] if group else []
        if group is None or not group.is_full or not living or any(r.is_frozen for r in group.members.values()):
            return
        rank: SimulatedRank = self.rng.choice(living)
        self.scheduler.log(f"{how} {rank.process} on {rank.process.host}")
        if how == "signal":
            self.job.signal_pid(rank.pid, int(signal.SIGTERM))
        group.victims.add(rank.rank)
        self._strike(rank, how)

    def _strike(self, rank: SimulatedRank, how: str) -> None:
        if how == "kill":
            rank.end(-int(signal.SIGKILL))
        elif how == "freeze":
            rank.is_frozen = rank.process.stopped = True
            self._rest(self.rng.choice((1.0, 12.0)))
            rank.process.stopped = False
        elif how != "signal":
            rank.order = how

    def _some(self) -> int | None:
        running = [i for i, process in enumerate(self.job.launchers) if process is not None and not process.dead]
        return self.rng.choice(running) if running else None

    def _kill_launcher(self) -> None:
        if (index := self._some()) is not None and (process := self.job.launchers[index]) is not None:
            self._note_hurt(process.host)
            self.job.kill(process)

    def _kill_all(self) -> None:
        for process in self.job.running():
            self._note_hurt(process.host)
            self.job.kill(process)

    def _signal_launcher(self) -> None:
        if (index := self._some()) is not None and (process := self.job.launchers[index]) is not None:
            self._note_hurt(process.host)
            self.scheduler.signal(process, self.rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT)))

    def _lose_host(self) -> None:
        if (index := self._some()) is not None:
            self._note_hurt(f"host-{index}")
            self.job.cut_power(index)

    def _cut_link(self) -> None:
        """Cut a host off from all the others, or from one; in both directions or in one."""
        names = [f"host-{index}" for index in range(self.shape.hosts)]
        one = self.rng.choice(names)
        others = [name for name in names if name != one]
        others = others if self.rng.random() < 0.7 else others[:1]
        self.network.cut |= {(one, other) for other in others}
        if self.rng.random() < 0.5:
            self.network.cut |= {(other, one) for other in others}
        self._last(one, *others)
        self.network.cut.clear()

    def _last(self, *hosts: str) -> None:
        """Let a fault of these hosts last for a while."""
        until = self.scheduler.now + self.rng.choice((1.0, 6.0, 20.0))
        while self.scheduler.now < until:
            self._note_hurt(*hosts)
            self._rest(TICK)

    def _freeze_host(self) -> None:
        if (index := self._some()) is None:
            return
        host = f"host-{index}"
        processes = [p for p in [*self.job.processes, *(rank.process for rank in self.job.ranks)] if p.host == host]
        frozen = [process for process in processes if not process.dead]
        for process in frozen:
            process.stopped = True
        self._last(host)
        for process in frozen:
            process.stopped = False

    def _slow_host(self) -> None:
        if (index := self._some()) is not None:
            self.network.slow[f"host-{index}"] = self.rng.choice((0.05, 0.3))
            self._last(f"host-{index}")
            self.network.slow.clear()

    def _jump_clock(self) -> None:
        if (index := self._some()) is not None and (process := self.job.launchers[index]) is not None:
            process.clock_offset += self.rng.choice((-172800.0, -60.0, 60.0, 172800.0))


def live(seed: int, shape: LaunchShape | None = None, only: tuple[str, ...] = ()) -> LaunchResult:
    """Run one life inside ``simulated_launchers``."""
    base = Path(tempfile.mkdtemp(prefix="life-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (base / "disks").mkdir()
    try:
        return LauncherLife(seed, base, shape, only).run()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    with simulated_launchers():
        result = live(int(sys.argv[1]))
    print("\n".join(result.trace))
    print(result.shape, dict(result.faults), f"{result.rounds} rounds, {result.switches} switches")
    print("\n".join(result.violations) or ("ended early" if result.ended_early else "all laws hold"))


if __name__ == "__main__":
    main()
