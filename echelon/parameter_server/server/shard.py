"""``ServerShard``: the request handler of one server of a job. It does not depend on the network layer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.base.errors import EchelonError, MismatchError, PeerLost, UsageError, nearest
from echelon.base.formatting import brief
from echelon.parameter_server.persistence.requested_path import requested_path
from echelon.parameter_server.protocol.job_spec import JobSpec, job_from_json
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.request import (
    MAX_WORKER,
    PullRequest,
    PushRequest,
    RequestError,
    ShardRequestSchema,
    check_numbers,
    flag,
    known_table,
    read_pull,
    read_push,
    text,
    whole,
    worker_of,
)
from echelon.parameter_server.server import dense
from echelon.parameter_server.server.job_workers import WorkerMembership
from echelon.parameter_server.server.membership_coordinator import Ask, MembershipCoordinator
from echelon.parameter_server.server.state import PersistenceProtocol, ServerState
from echelon.parameter_server.table import narrow

HasHungUp = Callable[[], bool]

#: Seconds between two checks for clients that hung up and workers that fell silent.
TICK = 0.1
#: Requests that a read-only server answers.
READS = ("hello", "pull", "stats")
#: Requests between servers about a worker; they do not count as heartbeats of that worker.
BETWEEN = ("verdict", "fence", "drop", "enter")
#: Requests that are answered before a job is open.
EARLY = ("hello", "open", "stats", "beat", "mirror", "mirrored")


class ServerShard(ServerState):
    """One server: its state, and the requests of workers and other servers. Row reads take only the table's own mutex.

    ask:        function that sends a message to another server of the job
    read_only:  answer reads of the loaded state only, and refuse changes; default False
    """

    def __init__(
        self, index: int, servers: int, *, ask: Ask | None = None, read_only: bool = False, **state: Any
    ) -> None:
        super().__init__(index, servers, **state)
        self.read_only = read_only
        self.coordinator = MembershipCoordinator(self, ask)
        self._opening = threading.Lock()
        self._operations = _operations(self)

    # ---- requests ----

    def handle(self, frame: WireMessage, has_hung_up: HasHungUp = lambda: False) -> WireMessage:
        """Answer one request. Each client has its own thread; ``has_hung_up`` tells if the client has."""
        try:
            operation = self._operation(frame.head)
            return operation(frame, has_hung_up)
        except EchelonError as error:
            return WireMessage({"error": " ".join(str(error).split()), "lost": isinstance(error, PeerLost)})

    def _operation(self, head: dict[str, Any]) -> Callable[[WireMessage, HasHungUp], WireMessage]:
        name = head.get("op")
        if not isinstance(name, str) or name not in self._operations:
            raise RequestError(f"there is no request {str(name)[:40]!r}{nearest(str(name)[:40], self._operations)}")
        if self.read_only and name not in READS:
            raise RequestError(f"server {self.server} is read-only: '{name}' is refused; use {', '.join(READS)}")
        if not self.opened and name not in EARLY:
            raise RequestError(f"server {self.server} has no open job, so '{name}' is refused; open a job first")
        if self.opened and name not in BETWEEN:
            self.heartbeats.hear(worker_of({"worker": -1, **head}))
        return self._operations[name]

    def hello(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Return what this server knows about a worker: membership, last push, version, saved blobs."""
        head: dict[str, Any] = {"ok": True, "server": self.server, "servers": self.servers, "opened": self.opened}
        if not self.opened:
            return WireMessage(head)
        with self.lock:
            worker = worker_of(frame.head)
            membership = self.members.memberships.get(worker, WorkerMembership())
            head |= {
                "session": self.job.session,
                "seq": membership.seq,
                "version": self.version,
                "member": membership.live(),
            }
            head |= {"begun": self.store.begun, "fenced": membership.fenced, "last": self.members.last_step(worker)}
            return WireMessage(head | {"saved": [seq for seq, _ in self.blobs.get(worker, [])]})

    def open(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Open the job, or check that the worker describes the open job. A new session replaces the state."""
        plain = frame.head.get("job")
        if not isinstance(plain, dict):
            raise RequestError("a request 'open' has no description of the job")
        job = job_from_json(plain)
        with self._opening:
            if self.opened and self.job.session == job.session:
                _agree(self.job, job, worker_of(frame.head))
            else:
                _check(job, self.servers)
                self.install(job)
        self.heartbeats.hear(worker_of(frame.head))
        return WireMessage({"ok": True})

    def begin(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Set the initial values of the dense blocks. Only worker 0's values are used, and only once."""
        values = frame.arrays[0] if frame.arrays else np.empty(0, np.float32)
        if values.dtype != np.float32 or values.size != self.dense.size:
            raise RequestError(f"initial values: {values.size} {values.dtype}, expected {self.dense.size} float32")
        if not np.isfinite(values).all():
            raise RequestError("the initial values contain NaN or infinity; look at the model's initialization")
        with self.lock:
            if worker_of(frame.head) == 0 and not self.store.begun:
                self.change(self.stamped(frame))
        return WireMessage({"ok": True})

    def pull(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Return rows and blocks for a step, as soon as the step may begin."""
        pull = read_pull(frame, self.layout)
        if self.read_only and not pull.peek:
            raise RequestError(f"server {self.server} is read-only: pull with peek")
        if pull.commit is not None:
            self._commit(pull.worker, pull.commit)
        waited = self._wait_for(pull, has_hung_up)
        with self.lock:
            self.counts["pulls"] += 1
            self.counts["waited"] += waited
            figures = {"version": self.version, "waited": waited} | ({} if pull.peek else self._step_figures())
        rows = [self._rows(name, ids, pull.state) for name, ids in pull.ids.items()]
        arrays = [rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else np.empty(0, np.float32)]
        arrays = [narrow(rows) for rows in arrays] if pull.narrow else arrays
        return WireMessage({"ok": True, **figures}, arrays + [self.dense.values()] * pull.dense)

    def _step_figures(self) -> dict[str, Any]:
        """Return the figures of the previous step; all workers get the same, because none has pushed the next step."""
        return {"rows": self.store.capped_rows()} | ({} if self.mode.loss is None else {"loss": self.mode.loss})

    def _rows(self, name: str, ids: Any, state: bool) -> Any:
        table = self.tables[name]
        return (table.pull_state(ids) if state else table.pull(ids)).reshape(-1)

    def push(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Take a worker's update; a repeated one is acknowledged but not applied again."""
        layout = self.layout
        push = frame.parsed = read_push(frame, layout)  # a change of this layout applies it without parsing it again
        check_numbers(push, layout.dense)
        with self.lock:
            if self.layout is not layout:
                raise RequestError("the job was replaced by another session")
            membership = self.membership(push.worker)
            answer: dict[str, Any] = {"version": self.version, "staleness": 0, "duplicate": True}
            if push.seq <= membership.seq:
                self.counts["duplicates"] += 1
            else:
                self._check_order(push, membership)
                answer = self.change(self.stamped(frame))
            if self.job.mode != "sync":  # in sync mode pulls report them, so that all workers get the same numbers
                answer["rows"] = self.store.capped_rows()
        return WireMessage({"ok": True, **answer}, [self.dense.values()] * push.values)

    def _check_order(self, push: PushRequest, membership: WorkerMembership) -> None:
        if push.seq != membership.seq + 1:
            raise RequestError(
                f"worker {push.worker}'s push {push.seq} reached server {self.server} after its push {membership.seq}; "
                "the pushes between them are missing"
            )
        self.mode.check(push)

    def commit(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Record that all servers have a worker's pushes up to this one."""
        self._commit(worker_of(frame.head, 0), whole(frame.head, "seq", -1))
        return WireMessage({"ok": True, "version": self.version})

    def _commit(self, worker: int, seq: int) -> None:
        with self.lock:
            membership = self.membership(worker)
            if seq > membership.seq:
                raise RequestError(f"worker {worker} commits push {seq}, but its last one here is {membership.seq}")
            if seq > membership.committed:
                self.change(self.stamped(WireMessage({"op": "commit", "worker": worker, "seq": seq})))

    def leave(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Remove a worker that is done from the job. All of its pushes count."""
        return self._once(
            frame, lambda worker: self.members.is_live(worker) and not self.members.memberships[worker].fenced
        )

    def new_pass(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Record that a worker has finished a pass over the data; ``passes``, if given, is its total number of passes.

        Without ``passes``, a second request with no push in between is a retry and counts as the same pass.
        """
        total = None if frame.head.get("passes") is None else whole(frame.head, "passes", 0)

        def is_new(worker: int) -> bool:
            membership = self.membership(worker)
            return (
                membership.passes < total
                if total is not None
                else not (membership.passes and membership.pass_after == membership.seq)
            )

        return self._once(frame, is_new)

    def _once(self, frame: WireMessage, needed: Callable[[int], bool]) -> WireMessage:
        with self.lock:
            answer = self.change(self.stamped(frame)) if needed(worker_of(frame.head, 0)) else {}
        return WireMessage({"ok": True, **answer})

    def beat(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        return WireMessage({"ok": True, "opened": self.opened})

    def blob(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Return the last states that a worker stored on this server."""
        kept = self.blobs.get(worker_of(frame.head), [])
        return WireMessage({"ok": True, "steps": [seq for seq, _ in kept]}, [content for _, content in kept])

    def stats(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Return counters and sizes for display."""
        head: dict[str, Any] = {"ok": True, "server": self.server, "opened": self.opened, "lsn": self.lsn}
        if not self.opened:
            return WireMessage(head)
        with self.lock:
            head |= {"version": self.version, "mode": self.job.mode, **self.counts}
            head |= {"staleness": self.mode.staleness.report(), "members": self.members.live()}
            head |= {"seqs": {str(worker): membership.seq for worker, membership in self.members.memberships.items()}}
            head |= {"steps": {name: table.step for name, table in self.tables.items()}, "passes": self.store.passes}
        head["rows"] = {name: len(table) for name, table in self.tables.items()}
        head["bytes"] = {name: table.memory() for name, table in self.tables.items()}
        return WireMessage(head | {"dense": self.dense.size, "silent": self._silences(), "broken": self.broken})

    def figures(self) -> dict[str, Any]:
        """Return this server's figures for the run log. The job must be open."""
        with self.lock:
            stale = self.mode.staleness
            old = None if self.job.mode == "sync" else {"mean": round(stale.mean(), 3), "max": stale.largest}
            counts = {"pulls": self.counts["pulls"], "pushes": self.counts["pushes"]}
        return {"rows": {name: len(table) for name, table in self.tables.items()}, **counts, "staleness": old}

    def _silences(self) -> dict[str, float]:
        return {str(worker): round(self.heartbeats.silence(worker), 1) for worker in self.members.live()}

    # ---- between servers ----

    def verdict(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        return WireMessage({"ok": True, **self.coordinator.verdict(worker_of(frame.head, 0))})

    def join(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        return WireMessage({"ok": True, **self.coordinator.join(worker_of(frame.head, 0))})

    def apply_decision(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Apply a decision of server 0: fence, drop or enter."""
        head = frame.head
        worker_of(head, 0)
        if head["op"] in ("drop", "enter"):
            whole(head, "last", -1)
        with self.lock:
            if head["op"] == "enter" and whole(head, "step", 0) < self.version and self.job.mode == "sync":
                raise RequestError(
                    f"worker {head['worker']} is to join at step {head['step']}, which is over; join again"
                )
            return WireMessage({"ok": True, **self.change(self.stamped(frame))})

    # ---- persistence ----

    def save(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        self._kept(frame).save(requested_path(text(frame.head, "path")), whole(frame.head, "step", 0))
        return WireMessage({"ok": True})

    def load(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        step = self._kept(frame).load(requested_path(text(frame.head, "path")))
        return WireMessage({"ok": True, "step": step})

    def export(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        head = frame.head
        since = None if head.get("since") is None else whole(head, "since", 0)
        table, form = known_table(head.get("table"), self.layout), text(head, "format")
        path = requested_path(text(head, "path"))
        base = since is None and not flag(head, "chained")
        rows, version = self._kept(frame).export(path, table, form, since, base)
        return WireMessage({"ok": True, "rows": rows, "version": version})

    def mirror(self, frame: WireMessage, has_hung_up: HasHungUp) -> WireMessage:
        """Store or return files of another server's replica."""
        return self._kept(frame).handle(frame)

    def _kept(self, frame: WireMessage) -> PersistenceProtocol:
        if self.persistence is None:
            raise RequestError(
                f"server {self.server} has no state directory, so it cannot {frame.head['op']}; give it a directory"
            )
        return self.persistence

    # ---- waiting ----

    def _wait_for(self, pull: PullRequest, has_hung_up: HasHungUp) -> float:
        def missing() -> dict[int, str]:
            if not self.store.begun:
                if self.broken:
                    raise EchelonError(self.broken)
                return {0: "has not sent the initial values"}
            if pull.peek:
                return {}
            self.membership(pull.worker)
            return self.mode.missing(pull.worker, pull.step)

        return self._wait(missing, f"step {pull.step}", pull.worker, has_hung_up)

    def _wait(self, missing: Callable[[], dict[int, str]], what: str, worker: int, has_hung_up: HasHungUp) -> float:
        """Wait until no worker is missing, and return the seconds waited."""
        began, layout = self._clock(), self.layout
        while True:
            with self.lock:
                self._check_going_on(layout)
                late = missing()
            if not late:
                return self._clock() - began
            if has_hung_up():
                raise PeerLost(f"worker {worker} closed the connection while it waited for {what}")
            self.heartbeats.hear(worker)
            self.coordinator.drop_silent_workers(late, what, self._clock() - began)
            with self.lock:
                if self.layout is layout and missing():
                    self.moved.wait(TICK)

    def _check_going_on(self, layout: ShardRequestSchema) -> None:
        if self.reason:
            raise PeerLost(self.reason)
        if self.closed or self.layout is not layout:
            raise PeerLost(
                f"server {self.server} is shutting down" if self.closed else "the job was replaced by another session"
            )

    def done(self) -> bool:
        """Return True if the job is open and all workers have left."""
        with self.lock:
            return self.opened and not self.members.live()

    def dismiss(self, reason: str) -> None:
        """Make all waiting requests fail with ``reason``."""
        with self.lock:
            self.reason = self.reason or reason
            self.moved.notify_all()

    def close(self, reason: str = "") -> None:
        """Make all waiting requests fail, refuse further changes and stop persistence."""
        self.dismiss(reason)
        with self.lock:
            self.closed = True
            self.moved.notify_all()
            persistence, self.persistence = self.persistence, None
        if persistence is not None:
            persistence.close()


def _operations(shard: ServerShard) -> dict[str, Callable[[WireMessage, HasHungUp], WireMessage]]:
    own = ("hello", "open", "begin", "pull", "push", "commit", "leave", "new_pass", "beat", "blob", "stats")
    named: dict[str, Callable[[WireMessage, HasHungUp], WireMessage]] = {name: getattr(shard, name) for name in own}
    named |= {"verdict": shard.verdict, "join": shard.join}
    named |= dict.fromkeys(BETWEEN[1:], shard.apply_decision)
    named |= {"save": shard.save, "load": shard.load, "export": shard.export}
    return named | dict.fromkeys(("mirror", "mirrored"), shard.mirror)


def _check(job: JobSpec, servers: int) -> None:
    if job.servers != servers:
        raise MismatchError(
            f"a job for {job.servers} servers reached one of {servers}; give all the same list of servers"
        )
    if not 1 <= job.trainers <= MAX_WORKER:
        raise UsageError(f"a job of {job.trainers} workers; there must be 1 or more")
    if job.staleness < 0 or not job.patience > 0 or job.compensate < 0:
        raise UsageError("a job's staleness and compensate must be 0 or more, and its patience above 0")
    names = [table.name for table in job.tables]
    if len(set(names)) != len(names):
        raise UsageError(f"a job has two tables of one name among {', '.join(names)}; give each its own")
    dense.check(job)


def _agree(known: JobSpec, given: JobSpec, worker: int) -> None:
    newcomer = dataclasses.replace(given, trainers=known.trainers)  # a late worker counts itself, too
    difference = _difference(known.to_json(), newcomer.to_json(), "job")
    if difference:
        raise MismatchError(f"worker {worker} was built differently from the worker that opened the job: {difference}")


def _difference(known: Any, given: Any, path: str) -> str:
    """Return a description of the first place where two JSON values differ; '' if they are equal."""
    if isinstance(known, dict) and isinstance(given, dict):
        parts = [
            (f"{path}.{key}", known.get(key), given.get(key)) for key in [*known, *(k for k in given if k not in known)]
        ]
    elif isinstance(known, list) and isinstance(given, list) and len(known) == len(given):
        parts = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(known, given, strict=True))]
    else:
        return "" if known == given else f"{path} is {brief(given)}, not {brief(known)}"
    return next((found for name, a, b in parts if (found := _difference(a, b, name))), "")
