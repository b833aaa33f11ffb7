"""A job of real parameter servers and workers as simulated processes.

Servers run ``ParameterServerProcess`` with all that belongs to it: journal, snapshots, replicas, membership, the search
for earlier state. Workers run the real client, channels and heartbeats; their model is a row per push.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from push_history import AMOUNT, Push, PushHistory
from scheduler import Scheduler, SimulatedProcess, active
from simulated_disk import SimulatedDisk
from simulated_network import SimulatedNetwork

from echelon.base.errors import EchelonError, UsageError
from echelon.base.security import OPEN
from echelon.distributed.ps_role import Role
from echelon.parameter_server.persistence.persistence import ShardPersistence
from echelon.parameter_server.protocol.hashing import bucket_of, owner_of
from echelon.parameter_server.protocol.job_spec import (
    BUCKETS,
    DenseBlock,
    DenseRule,
    Initializer,
    JobSpec,
    PersistenceSettings,
    TableSpec,
)
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.process import ParameterServerProcess
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.server.store import ServerStore
from echelon.parameter_server.table import Table
from echelon.parameter_server.worker.client import IdPartition, ParameterServerClient, WorkerUpdate
from echelon.parameter_server.worker.server_connections import ServerConnections
from echelon.strategy.sparse_update_rules import Sgd

ENTRIES = 3  # dense entries on each server
#: Ids lie in these buckets only, and tables keep no others: most of a snapshot's time goes into empty buckets.
KEPT_BUCKETS = tuple(range(0, BUCKETS, 64))
_ANY = np.arange(1, 40_000, dtype=np.int64)
_IDS = _ANY[np.isin(bucket_of(_ANY, BUCKETS), KEPT_BUCKETS)]


@dataclass(frozen=True)
class JobShape:
    """The fixed facts of a life's job."""

    mode: str = "async"
    servers: int = 1
    workers: int = 2
    steps: int = 12
    replica: bool = False
    journal: bool = True
    fsync: bool = False
    snapshot_every: float = 1.0
    journal_limit: int = 1 << 30
    patience: float = 8.0
    expire_seconds: float | None = None


def make_spec(shape: JobShape) -> JobSpec:
    first = Initializer(kind="constant", low=0.0, high=0.0)
    table = TableSpec(name="t", dim=2, rule=Sgd(lr=1.0), initializer=first, expire_seconds=shape.expire_seconds)
    blocks = [
        DenseBlock(parameter="p", offset=server * ENTRIES, length=ENTRIES, shape=(ENTRIES,), server=server)
        for server in range(shape.servers)
    ]
    return JobSpec(
        session="job/0", mode=shape.mode, trainers=shape.workers, servers=shape.servers, tables=(table,),
        blocks=tuple(blocks), dense=DenseRule(kind="SGD", groups=({"lr": 1.0},)), patience=shape.patience,
        keeping=PersistenceSettings(
            journal=shape.journal, replica=shape.replica, snapshot_every=shape.snapshot_every
        ),
    )  # fmt: skip


class SimulatedServer(ParameterServerProcess):
    """A server process with a small journal limit, and synced records if the life wants them."""

    shape: JobShape

    def __init__(self, role: Role, state: Path, shape: JobShape) -> None:
        self.shape = shape
        super().__init__(role, state, OPEN)

    def _open_persistence(self, shard: Any) -> ShardPersistence:
        made = super()._open_persistence(shard)
        made._limit, made._fsync = self.shape.journal_limit, self.shape.fsync
        return made


class FewBuckets(ServerStore):
    """A store whose tables go through ``KEPT_BUCKETS`` alone."""

    def _table(self, spec: TableSpec, directory: Path | None) -> Table:
        table = super()._table(spec, directory)
        table.buckets = tuple(bucket for bucket in table.buckets if bucket in KEPT_BUCKETS)  # type: ignore[assignment]
        return table


@dataclass
class SimulatedJob:
    """The processes of a job, and what is known of them outside.

    finished:  workers whose steps are all done; they wait for ``over`` before they leave
    endings:   errors with which processes have ended, each with the name of the process
    """

    shape: JobShape
    scheduler: Scheduler
    disk: SimulatedDisk
    network: SimulatedNetwork
    rng: random.Random
    root: Path
    finished: set[int] = field(default_factory=set)
    endings: list[tuple[str, BaseException]] = field(default_factory=list)
    processes: list[SimulatedProcess] = field(default_factory=list)
    readings: dict[int, float] = field(default_factory=dict)  # in sync mode: the value of shared rows at each step
    misreadings: list[str] = field(default_factory=list)
    over: bool = False
    hosts: dict[int, str] = field(default_factory=dict)  # of servers that were started on another one

    def __post_init__(self) -> None:
        self.spec = make_spec(self.shape)
        self.endpoints = tuple(f"10.0.0.{server}:2900{server}" for server in range(self.shape.servers))
        owners = np.array([owner_of(int(b), BUCKETS, self.shape.servers) for b in bucket_of(_IDS, BUCKETS)])
        own = [_IDS[owners == server].tolist() for server in range(self.shape.servers)]
        self.shared = [ids.pop() for ids in own]
        self.history = PushHistory(self.shape.mode, self.shape.servers, own)
        self.epochs = [0] * self.shape.workers
        self.servers: list[SimulatedProcess | None] = [None] * self.shape.servers
        self.workers: list[SimulatedProcess | None] = [None] * self.shape.workers
        self.programs: dict[SimulatedProcess, SimulatedServer] = {}
        self.disk.on_death = self.kill
        for server in range(self.shape.servers):
            (self.root / f"server-{server}").mkdir()

    # ---- processes ----

    def _start(self, name: str, host: str, main: Callable[[SimulatedProcess], None]) -> SimulatedProcess:
        process = SimulatedProcess(name, host, pid=1000 + len(self.processes))
        self.processes.append(process)

        def run() -> None:
            try:
                main(process)
                process.ending = 0
            except Exception as error:
                process.ending = error
                self.endings.append((name, error))
                self.scheduler.log(f"ends: {type(error).__name__}: {error}")
            self.kill(process)

        self.scheduler.spawn(process, run, "main")
        return process

    def start_server(self, index: int) -> SimulatedProcess:
        """Start a process of server ``index`` on its host."""
        role = Role(
            role="server", index=index, endpoints=self.endpoints, workers=self.shape.workers,
            current_endpoint=self.endpoints[index], session="job", join_timeout=60.0,
        )  # fmt: skip

        def main(process: SimulatedProcess) -> None:
            self.programs[process] = SimulatedServer(role, self.root / f"server-{index}" / "state", self.shape)
            self.programs[process].hold()

        self.servers[index] = self._start(f"server {index}", self.hosts.get(index, f"server-{index}"), main)
        return self.servers[index]  # type: ignore[return-value]

    def start_worker(self, index: int) -> None:
        self.finished.discard(index)
        self.workers[index] = self._start(
            f"worker {index}", f"worker-{index}", lambda process: SimulatedWorker(self, index).train()
        )

    def kill(self, process: SimulatedProcess, silently: bool = False) -> None:
        """Kill a process; ``silently``: its host is gone with it, so its peers do not learn of it."""
        if not process.dead:
            self.scheduler.kill(process)
            self.disk.release(process)
            self.network.release(process, silently)

    def counted_as_lost(self) -> list[SimulatedProcess]:
        """Return the processes of servers that still run, though another process was started in their place."""
        return [p for p in self.processes if not p.dead and p in self.programs and p not in self.servers]

    def running(self) -> list[SimulatedProcess]:
        return [p for p in [*self.servers, *self.workers] if p is not None and not p.dead]

    def shard(self, server: int) -> ServerShard | None:
        """Return the shard of a server that runs with an open job."""
        process = self.servers[server]
        program = self.programs.get(process) if process is not None and not process.dead else None
        return program.shard if program is not None and program.shard.opened else None

    # ---- the laws' view of the state ----

    def rows(self, shard: ServerShard, server: int) -> tuple[dict[int, float], float, float]:
        """Return the values of the pushes' own rows, of the shared row, and of the dense entries."""
        ids = np.array([own[server] for own in self.history.sent.values()] + [self.shared[server]], np.int64)
        values = shard.tables["t"].pull(ids)
        dense = shard.dense.values()
        if (values[:, 0] != values[:, 1]).any() or (dense != dense[0]).any():
            raise AssertionError(f"server {server} has changed a row or a block in part")
        return dict(zip(ids[:-1].tolist(), values[:-1, 0].tolist(), strict=True)), float(values[-1, 0]), float(dense[0])

    def restored(self, server: int) -> ServerShard:
        """Return a shard that a fresh process would restore from a copy of a server's present files."""
        copy = Path(tempfile.mkdtemp(dir=self.root.parent))
        source = self.root / f"server-{server}" / "state"
        home = next(source.glob(f"*/server-{server}"))
        shutil.copytree(home, copy / "state")
        settings = PersistenceSettings(journal=self.shape.journal, snapshot_every=1e9)

        def keep(shard: Any) -> ShardPersistence:
            return ShardPersistence(shard, copy / "state", settings)

        shard = ServerShard(server, self.shape.servers, keep=keep)
        answer = shard.handle(WireMessage({"op": "open", "worker": -1, "job": self.spec.to_json()}))
        if "error" in answer.head:
            raise AssertionError(f"a fresh process cannot restore server {server}: {answer.head['error']}")
        shard.close()
        shutil.rmtree(copy)
        return shard


class SimulatedWorker:
    """A worker: reads, computes for a moment, pushes; takes up where it was after a restart."""

    def __init__(self, job: SimulatedJob, index: int) -> None:
        self.job, self.index, self.shape = job, index, job.shape

    def train(self) -> None:
        job = self.job
        role = Role(
            role="worker", index=self.index, endpoints=job.endpoints, workers=self.shape.workers, session="job",
            join_timeout=60.0,
        )  # fmt: skip
        contact = ServerConnections(role, job.spec, 30.0)
        client = ParameterServerClient(contact.links, job.spec, self.index)
        try:
            client.open()
            standing = client.hello()
            contact.keep()
            if not self._resume(client, standing) and self.index == 0:
                client.begin([np.zeros(ENTRIES, np.float32)] * self.shape.servers)
            while client.seq < self.shape.steps:
                self._step(client)
            if client.seq == self.shape.steps:  # else it has joined at the end, behind the last step
                client.refresh(client.seq, dense=True, peek=self.shape.mode != "sync")
            job.finished.add(self.index)
            while not job.over:
                client.ask(op="stats")  # a worker that evaluates reads now and then
                active().sleep(1.0)
            client.leave()
        finally:
            contact.close()
            client.close()

    def _resume(self, client: ParameterServerClient, standing: list[dict[str, Any]]) -> bool:
        """Take up where this worker was, as ``ParameterServerSession.resumed`` does; return False at a first start."""
        seq = client.last_push(standing)
        if seq is None:
            self._join(client)
            return True
        if seq < 0:
            return False
        kept = client.links[0].call(WireMessage({"op": "blob", "worker": self.index}))
        if seq not in kept.head["steps"]:
            raise UsageError(f"server 0 has no state of worker {self.index} after step {seq}; start the job again")
        client.resume_at(seq + 1)
        return True

    def _join(self, client: ParameterServerClient) -> None:
        job = self.job
        job.history.dropped.add((self.index, job.epochs[self.index]))
        job.epochs[self.index] += 1
        client.resume_at(int(client.links[0].call(WireMessage({"op": "join", "worker": self.index})).head["step"]))

    def _step(self, client: ParameterServerClient) -> None:
        job, servers = self.job, self.shape.servers
        push = Push(self.index, job.epochs[self.index], client.seq)
        ids = np.array([*job.history.ids_of(push), *job.shared], np.int64)
        reading = client.pull({"t": ids}, step=client.seq, dense=True)
        rows, values = reading.rows()["t"], reading.take_dense()
        self._check_reading(client.seq, rows, values)
        active().sleep(job.rng.expovariate(1 / 0.1))
        client.collect(1 if self.shape.mode == "async" else 0)
        share = IdPartition.of(ids, servers)
        gradients = np.full((len(ids), 2), AMOUNT, np.float32)
        update = WorkerUpdate(
            weight=1.0, tables={"t": (share, gradients)}, rates={"t": 1.0},
            dense=[np.full(ENTRIES, AMOUNT, np.float32)] * servers, blob=np.array([client.seq % 256], np.uint8),
        )  # fmt: skip
        client.push(update, reading.moment)
        for server, answer in enumerate(client._under_way[-1]):
            answer.add_done_callback(lambda done, server=server: self._note(push, server, done))

    def _note(self, push: Push, server: int, done: Any) -> None:
        if done.exception() is None:
            self.job.history.answered[push].add(server)

    def _check_reading(self, step: int, rows: Any, values: list[Any]) -> None:
        """Check that all workers read the same weights for a step, from every server."""
        if self.shape.mode == "sync":
            found = {*rows[self.shape.servers :, 0].tolist(), *np.concatenate(values).tolist()}
            found |= {self.job.readings.setdefault(step, min(found))}
            if len(found) != 1:
                self.job.misreadings.append(f"worker {self.index} reads {sorted(found)} for step {step}")


def is_named(error: BaseException) -> bool:
    """Return True if an error is one line for a user, and not a failure of the program."""
    return isinstance(error, EchelonError) and "failed with" not in str(error)
