"""Launchers as simulated processes: real agents, rendezvous and signals, with ranks that are stubs.

A launcher runs ``HostAgent`` as ``echelon run`` does. Its store, its network and its clock are simulated, and so are
the processes that it starts; a stand-in for the reaper kills them when it dies.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed.elastic.agent.server.api as torch_agent
import torch.distributed.elastic.agent.server.local_elastic_agent as torch_local_agent
from interposition import Change, simulated_system
from scheduler import Scheduler, SimulatedProcess, active
from simulated_ranks import RankGroup, SimulatedContext, SimulatedRank
from simulated_store import HostNetwork, QueueModule, StoreTable, address_of, own_process
from simulated_threading import SimulatedEvent
from torch.distributed.elastic.multiprocessing import SignalException

from echelon.base import console, network
from echelon.base.errors import EchelonError
from echelon.launcher import agent, graceful_stop, launch_job, signals
from echelon.launcher.agent import HostAgent
from echelon.launcher.agent_plugin import Round
from echelon.launcher.failure import STALLED, Failure
from echelon.launcher.graceful_stop import GracefulStopMarkers
from echelon.launcher.job import Job
from echelon.launcher.rank_environment import RankEnvironment
from echelon.launcher.rendezvous import handler, open_rendezvous, participant, store_client
from echelon.launcher.rendezvous.messages import RoundOutcome
from echelon.launcher.run_options import RunOptions

PORT = 29500
#: Seconds without a step after which the stand-in for the stall watch names a stopped rank.
STALL = 5.0


@dataclass(frozen=True)
class LaunchShape:
    """The fixed facts of a life's job.

    hosts:    number of machines; those beyond ``most`` are spares
    masters:  number of places of --master
    saves:    True if ranks can save and leave
    """

    hosts: int = 2
    least: int = 2
    most: int = 2
    elastic: bool = False
    masters: int = 1
    procs: int = 1
    max_restarts: int = 3
    saves: bool = True
    host_timeout: float = 6.0
    join_timeout: float = 40.0
    grace: float = 6.0


@dataclass
class LauncherEnding:
    """The end of one launcher by itself, with the round that it was in."""

    host: int
    code: int
    error: BaseException | None
    at: float
    tokens: tuple[str, ...]


@dataclass
class AdoptedOutcome:
    """The outcome of a round as one host has adopted it."""

    host: str
    tokens: tuple[str, ...]
    number: int
    outcome: RoundOutcome
    group: RankGroup | None
    at: float


@dataclass
class SimulatedLaunchers:
    """The launchers of a job, one for each host, and what is known of them outside."""

    shape: LaunchShape
    scheduler: Scheduler
    network: HostNetwork
    rng: random.Random
    root: Path
    over: bool = False
    launchers: list[SimulatedProcess | None] = field(default_factory=list)
    processes: list[SimulatedProcess] = field(default_factory=list)
    agents: dict[SimulatedProcess, SimulatedAgent] = field(default_factory=dict)
    ranks: list[SimulatedRank] = field(default_factory=list)
    groups: list[RankGroup] = field(default_factory=list)
    endings: list[LauncherEnding] = field(default_factory=list)
    outcomes: list[AdoptedOutcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pids = itertools.count(1000)
        self.launchers = [None] * self.shape.hosts

    def next_pid(self) -> int:
        return next(self._pids)

    # ---- launchers ----

    def start(self, index: int) -> None:
        process = SimulatedProcess(f"launcher {index}", f"host-{index}", self.next_pid())
        process.on_signal = lambda number: signals._stop(number, None)
        self.processes.append(process)
        self.launchers[index] = process

        def run() -> None:
            code, error = self._launch(process, index)
            process.ending = code
            active().log(f"exits with {code}: {error}")
            tokens = self._tokens(process)
            self.endings.append(LauncherEnding(index, code, error, self.scheduler.now, tokens))
            if left := self.ranks_of(process):
                self.violations.append(f"launcher {index} has ended and {[r.process for r in left]} still run")
            self.scheduler.kill(process)

        self.scheduler.spawn(process, run, "main")

    def _tokens(self, process: SimulatedProcess) -> tuple[str, ...]:
        own = self.agents.get(process)
        return () if own is None else tuple(host.token for host in own._launcher_rendezvous.hosts)

    def _launch(self, process: SimulatedProcess, index: int) -> tuple[int, BaseException | None]:
        """Do what ``launch`` and the command line do; return the exit code and the error."""
        job, records = self._job(), self.root / f"records-{process.pid}"
        records.mkdir()
        try:
            process.main = active().current
            rendezvous = open_rendezvous.open_rendezvous(job, address_of(process.host), dict, console.say)
            ranks = RankEnvironment(records, records)
            plugins = [SimulatedStallPlugin(self)]
            reaper: Any = SimpleNamespace(watch=lambda sessions: None)
            own = SimulatedAgent(job, rendezvous, ranks, reaper, process.host, GracefulStopMarkers(records), plugins)
            self.agents[process] = own
            own.owner = self
            return launch_job._run_agent(own, rendezvous), own.last_failure
        except SignalException as stop:
            return 128 + int(stop.sigval), stop
        except EchelonError as error:
            return 1, error
        except Exception as error:
            self.violations.append(f"launcher {index} ends with a traceback: {error!r}")
            return 1, error

    def _job(self) -> Job:
        shape = self.shape
        nnodes = f"{shape.least}:{shape.most}" if shape.elastic else str(shape.most)
        options = RunOptions(
            script="train.py", nnodes=nnodes, join_timeout=shape.join_timeout, last_call=1.0,
            host_timeout=shape.host_timeout, grace=shape.grace,
        )  # fmt: skip
        masters = tuple((address_of(f"host-{place}"), PORT + place) for place in range(shape.masters))
        return Job(
            options, procs=shape.procs, nnodes=shape.most, fewest=shape.least,
            elastic=nnodes if shape.elastic else None, masters=masters if shape.most > 1 else (),
            max_restarts=shape.max_restarts, copies=0, log_dir=self.root, visible_gpus=None, timeline=None, plan=None,
            roles=None,
        )  # fmt: skip

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a launcher with SIGKILL; its reaper kills the ranks a moment later."""
        self.scheduler.kill(process)

        def reap() -> None:
            self.scheduler.sleep(0.05)
            for rank in self.ranks_of(process):
                rank.end(-int(signal.SIGKILL))

        self.scheduler.spawn(None, reap, "reaper")

    def cut_power(self, index: int) -> None:
        """Kill all processes of a host at once, so that no peer learns of it."""
        self.network.dark.add(f"host-{index}")
        if (process := self.launchers[index]) is not None:
            self.scheduler.kill(process)
        for rank in self.ranks:
            if rank.process.host == f"host-{index}":
                rank.end(-int(signal.SIGKILL), silently=True)

    def ranks_of(self, launcher: SimulatedProcess) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.launcher is launcher and rank.code is None]

    def running(self) -> list[SimulatedProcess]:
        return [process for process in self.launchers if process is not None and not process.dead]

    # ---- ranks ----

    def start_ranks(self, envs: dict[int, dict[str, str]], logs_specs: RankEnvironment, **_: Any) -> SimulatedContext:
        """Start the ranks of a host, as ``start_processes`` of torch does."""
        logs_specs.reify(envs)
        launcher = own_process()
        if left := [rank for rank in self.ranks if rank.process.host == launcher.host and rank.code is None]:
            self.violations.append(f"{launcher} starts ranks while {[rank.process for rank in left]} still run")
        started = {local: SimulatedRank(self, env) for local, env in envs.items()}
        self.ranks += started.values()
        return SimulatedContext(started)

    def meet(self, table: StoreTable, rank: SimulatedRank) -> RankGroup:
        """Return the group of a store, with this rank in it."""
        group = next((group for group in self.groups if group.table is table), None)
        if group is None:
            group = RankGroup(table, rank.generation, rank.world)
            self.groups.append(group)
        if (group.generation, group.world) != (rank.generation, rank.world) or rank.rank in group.members:
            self.violations.append(f"{rank.process} of {rank.world} meets {sorted(group.members)} of {group.world}")
        group.members[rank.rank] = rank
        active().wake(group.waiting)
        return group

    def can_talk(self, group: RankGroup) -> bool:
        hosts, ranks = group.hosts, group.members.values()
        is_there = not any(rank.process.stopped or rank.code is not None for rank in ranks)
        return is_there and all(self.network.passes(one, other) for one in hosts for other in hosts)

    def note_step(self, group: RankGroup) -> None:
        """Note that a group makes a step: none of an earlier round may make one after it."""
        if group.first_step_at < 0:
            group.first_step_at = self.scheduler.now
            self.scheduler.log(f"round {group.generation}: first step of {group.world} ranks on {sorted(group.hosts)}")
        later = [other for other in self.groups if other.first_step_at > group.first_step_at]
        if later:
            self.violations.append(f"rounds {group.generation} and {later[0].generation} make steps at once")
        if not self.shape.least <= len(group.hosts) <= self.shape.most:
            self.violations.append(f"round {group.generation} has {len(group.hosts)} hosts")

    def group_of(self, rank: int, generation: int) -> RankGroup | None:
        return next((g for g in reversed(self.groups) if g.generation == generation and rank < g.world), None)

    def rank_of_pid(self, pid: int) -> SimulatedRank | None:
        return next((rank for rank in self.ranks if rank.pid == pid), None)

    def signal_pid(self, pid: int, number: int) -> None:
        if (rank := self.rank_of_pid(pid)) is not None:
            rank.send(number)

    def end_sessions(self, sessions: Iterable[int]) -> None:
        for pid in sessions:
            self.signal_pid(pid, int(signal.SIGKILL))


class SimulatedAgent(HostAgent):
    """An agent that tells the life which outcomes it adopts."""

    owner: SimulatedLaunchers
    last_failure: BaseException | None = None

    def _invoke_run(self, role: str = "") -> Any:
        try:
            return super()._invoke_run(role)
        except BaseException as error:
            self.last_failure = error
            raise

    def _end(self, outcome: RoundOutcome, requested: bool = False) -> bool:
        members = self._launcher_rendezvous.members
        tokens = tuple(host.token for host in members.hosts)
        ranks = self._pcontext.subprocess_handlers.values() if self._pcontext is not None else ()
        group = next((rank.group for rank in ranks if rank.group is not None), None)  # type: ignore[attr-defined]
        active().log(f"round {members.number} ends: {outcome.cause}, again={outcome.again}: {outcome.failure.line}")
        self.owner.outcomes.append(
            AdoptedOutcome(self._host, tokens, members.number, outcome, group, self.owner.scheduler.now)
        )
        return super()._end(outcome, requested)


class SimulatedStallPlugin:
    """A stand-in for the stall watch: the first host names a stopped rank that has kept its group waiting."""

    announcement: Mapping[str, str] = {}

    def __init__(self, job: SimulatedLaunchers) -> None:
        self._job, self._round, self._since = job, None, 0.0
        self._seen: Any = None

    def environment(self, at: Round) -> dict[str, str]:
        return {}

    def begin(self, at: Round, pids: Mapping[int, int]) -> None:
        self._round, self._seen, self._since = at, None, active().now

    def poll(self) -> Failure | None:
        at: Any = self._round
        if at is None or at.node_rank != 0:
            return None
        group = self._job.group_of(0, at.number)
        steps = group.steps if group is not None else -1
        if steps != self._seen:
            self._seen, self._since = steps, active().now
        if group is None or active().now - self._since < STALL:
            return None
        late = [rank for rank in group.members.values() if rank.is_frozen and rank.code is None]
        if not late:
            return None
        return Failure(late[0].rank, group.world, late[0].process.host, late[0].pid, 1, 0.0, kind=STALLED)

    def end(self) -> None:
        self._round = None

    def close(self) -> None: ...


class SimulatedStoreCall(store_client._StoreCall):
    """A call whose event is simulated: the class has taken the real one for its default."""

    def __init__(self, call: Any, store: Any) -> None:
        super().__init__(call, store, SimulatedEvent())  # type: ignore[arg-type]


_close = store_client.StoreClient.close


def _close_with_store(client: Any) -> None:
    """Close a client, and the store if this process serves it: torch's ends with its last reference."""
    store = client._store
    _close(client)
    _present[-1].network.close(store.table)


@contextlib.contextmanager
def _held_signals() -> Any:
    process = own_process()
    process.holds_signals = True
    try:
        yield
    finally:
        process.holds_signals = False


def _ignore(*_: Any, **__: Any) -> None: ...


def _drawn_uuid() -> uuid.UUID:
    return uuid.UUID(int=active().rng.getrandbits(128))


_present: list[SimulatedLaunchers] = []


def connect_launchers(job: SimulatedLaunchers | None) -> None:
    _present[:] = [job] if job is not None else []


def _of_job(name: str) -> Any:
    def call(*args: Any, **more: Any) -> Any:
        return getattr(_present[-1], name)(*args, **more)

    return call


def _of_network(name: str) -> Any:
    def call(*args: Any, **more: Any) -> Any:
        return getattr(_present[-1].network, name)(*args, **more)

    return call


def _changes() -> list[Change]:
    """Return what is replaced beside clocks, threads and files: object, attribute, present value, simulated value."""
    new = [
        (open_rendezvous, "serve_store", _of_network("serve_store")),
        (handler, "serve_store", _of_network("serve_store")),
        (open_rendezvous, "local_store_endpoint", _of_network("local_endpoint")),
        (handler, "local_store_endpoint", _of_network("local_endpoint")),
        (open_rendezvous, "TCPStore", _of_network("connect")),
        (open_rendezvous, "_no_stack_traces", contextlib.nullcontext),
        (open_rendezvous, "_hang_out_sign", _of_network("reserve")),
        (open_rendezvous, "_take_in_sign", lambda port: None),
        (network, "answers", _of_network("answers")),
        (network, "is_local", _of_network("is_local")),
        (network, "free_ports", _of_network("free_ports")),
        (store_client, "queue", QueueModule),
        (store_client, "_StoreCall", SimulatedStoreCall),
        (store_client.StoreClient, "close", _close_with_store),
        (participant, "uuid", SimpleNamespace(uuid4=_drawn_uuid)),
        (agent, "signals_held", _held_signals),
        (agent, "end_sessions", _of_job("end_sessions")),
        (agent, "note_beside", _ignore),
        (agent, "forget_logs", _ignore),
        (graceful_stop, "os", SimpleNamespace(kill=_of_job("signal_pid"))),
        (torch_local_agent, "start_processes", _of_job("start_ranks")),
        (torch_agent, "logger", SimpleNamespace(info=_ignore, warning=_ignore)),
        (torch_agent, "record", _ignore),
        (torch_agent, "_get_fq_hostname", lambda: "host"),
    ]
    return [(owner, name, getattr(owner, name), value) for owner, name, value in new]


def simulated_launchers() -> contextlib.AbstractContextManager[None]:
    """Put the simulated system in place inside the context, for any number of lives."""
    return simulated_system(*_changes())
