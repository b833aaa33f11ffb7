"""A server's state of a job, and the application of journaled changes to it: the part that a replay repeats."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError, MismatchError, PeerLost
from echelon.base.heartbeat_monitor import HeartbeatMonitor
from echelon.parameter_server.protocol.job_spec import BLOBS, JobSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.request import PushRequest, ShardRequestSchema, read_push
from echelon.parameter_server.server.dense import DenseShard
from echelon.parameter_server.server.job_workers import JobWorkers, WorkerMembership
from echelon.parameter_server.server.modes import MODES, SyncMode, UpdateMode
from echelon.parameter_server.server.monotonic_time import MonotonicTime
from echelon.parameter_server.server.staleness import Staleness
from echelon.parameter_server.server.store import ServerStore
from echelon.parameter_server.table.row_table import RowTable, TableMaker, host_table

log = logging.getLogger("echelon.parameter_server")


class PersistenceProtocol(Protocol):
    """Interface of the persistence of a shard, which keeps its state beyond the process."""

    def start(self) -> bool:
        """Restore the stored state of the job that was just opened; return True if there was any."""

    def close(self) -> None: ...

    def append(self, frame: WireMessage) -> None:
        """Journal a change; return when the change may be answered. The caller holds the shard's lock."""

    def handle(self, frame: WireMessage) -> WireMessage:
        """Answer ``mirror`` and ``mirrored``. This and the methods below are called without the shard's lock."""

    def save(self, path: Path, step: int) -> None: ...

    def load(self, path: Path) -> int: ...

    def export(
        self, path: Path, table: str, format: str, since: int | None = None, base: bool = True
    ) -> tuple[int, int]: ...


class ServerState:
    """One server's state.

    Every change goes through ``change`` under one lock: it is first written to the journal by ``persistence``, then
    passed to ``apply``, which reads no clock and no random numbers, so that the same messages in the same order give
    the same bits.

    directory:  directory for tables with a disk tier
    make_table: function that makes a table; default: in host memory
    keep:       function that makes the persistence of a job that opens; None: nothing outlives the process
    """

    def __init__(
        self,
        index: int,
        servers: int,
        *,
        directory: Path | None = None,
        keep: Callable[[Any], PersistenceProtocol | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        make_table: TableMaker = host_table,
    ) -> None:
        self.server, self.servers = index, servers
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.lsn = 0  #: number of changes applied so far
        self.opened = self.closed = False
        self.reason = ""  #: why the server ends, for requests that wait
        self.superseded = ""  #: why this process ends, if a later process of this server has taken over its directory
        self.persistence: PersistenceProtocol | None = None
        self.counts = {"pulls": 0, "pushes": 0, "duplicates": 0, "waited": 0.0}
        self._directory = directory
        self._keep = keep
        self._make_table = make_table
        self._clock = clock
        self._time = MonotonicTime(wall, clock)
        self._changes = _changes(self)

    def install(self, job: JobSpec) -> None:
        """Begin a job or restore its state; no request of the job is answered before that is done."""
        with self.lock:
            self.opened = False
            if self.persistence is not None:
                self.persistence.close()
            self.job, self.store = job, ServerStore(job, self.server, self._directory, self._make_table)
            self.layout = ShardRequestSchema(job, self.store.buckets, self.store.dense)
            self.members = JobWorkers(job.trainers)
            self.mode: UpdateMode = MODES[job.mode](job, self.store, self.members, self._finish_passes)
            self.blobs: dict[int, list[tuple[int, NDArray[np.uint8]]]] = {}
            self.broken, self.persistence, self.lsn = "", None, 0
            self.heartbeats = HeartbeatMonitor(self._clock)
            self.moved.notify_all()
        if self._keep is not None:
            self._bring_back(self._keep(self))
        self.opened = True

    def _bring_back(self, persistence: PersistenceProtocol | None) -> None:
        self.persistence = (
            persistence  # set before start(), because other servers may ask for the replicas that it stores
        )
        try:
            if persistence is not None and persistence.start():
                self._time.resume(self.store.now, self.store.shortest_expiry())
                for worker in self.members.live():
                    self.heartbeats.hear(worker)  # they were members before the restart: give them time to reconnect
        except BaseException:
            self.persistence = None
            raise

    @property
    def tables(self) -> Mapping[str, RowTable]:
        return self.store.tables

    @property
    def dense(self) -> DenseShard:
        return self.store.dense

    @property
    def version(self) -> int:
        return self.mode.version

    def membership(self, worker: int) -> WorkerMembership:
        """Return a worker's membership. Raises ``MismatchError`` if the worker is not a live member of the job."""
        if self.broken:
            raise EchelonError(self.broken)
        membership = self.members.memberships.get(worker)
        if membership is None or not membership.live() or membership.fenced:
            raise MismatchError(
                f"worker {worker} is not, or no longer, a member of the job on server {self.server}; it has to join"
            )
        return membership

    # ---- changes ----

    def stamped(self, frame: WireMessage) -> WireMessage:
        """Return the message with the current time in its head, because ``apply`` must not read a clock."""
        return WireMessage({**frame.head, "now": self._time.now()}, frame.arrays, frame.parsed)

    def change(self, frame: WireMessage) -> dict[str, Any]:
        """Journal a change, then apply it; return the head of the answer."""
        with self.lock:
            if self.broken:
                raise EchelonError(self.broken)
            if self.closed:  # changes are not journaled any more
                raise PeerLost(self.reason or f"server {self.server} is shutting down")
            if self.persistence is not None:
                self.persistence.append(frame)
            try:
                answer = self.apply(frame)
                self._note_evicted()
            except Exception as error:
                self._break(frame, error)
                log.exception("a change failed")
                raise EchelonError(self.broken) from error
            finally:
                self.moved.notify_all()  # also after a failure, so that requests that wait for this step learn of it
        if self.broken:
            raise EchelonError(self.broken)
        return answer

    def apply_step(self, pushes: list[PushRequest]) -> None:
        """Apply a whole step at once and without a journal, for workers that hold the tables themselves."""
        with self.lock:
            assert isinstance(self.mode, SyncMode)
            self.store.moment(self.lsn + 1, self._time.now())
            try:
                self.mode.apply_step(pushes)
            except EchelonError as error:
                self.stop_serving(" ".join(str(error).split()))  # the step was applied only in part
                raise
            finally:
                self.lsn += 1
            self._note_evicted()

    def apply(self, frame: WireMessage) -> dict[str, Any]:
        """Apply a journaled change. The result depends on nothing but the state and the message."""
        with self.lock:
            try:
                self.store.moment(self.lsn + 1, int(frame.head.get("now", 0)))
                return self._changes[frame.head["op"]](frame)
            except EchelonError as error:
                self.broken = " ".join(str(error).split())  # the step was applied only in part
                return {"error": self.broken}
            except BaseException as error:  # memory, torch, CUDA: the state no longer matches its journal
                self._break(frame, error)
                raise
            finally:
                self.lsn += 1

    def _break(self, frame: WireMessage, error: BaseException) -> None:
        """Mark the state as different from its journal: it is neither served nor written to disk from now on."""
        head = frame.head
        of = f" {head['seq']}" if "seq" in head else ""
        of += f" of worker {head['worker']}" if "worker" in head else ""
        reason = " ".join(str(error).split())[:300]
        self.broken = self.broken or (
            f"server {self.server} failed with {type(error).__name__}{': ' if reason else ''}{reason} while it applied "
            f"{head['op']}{of}; start the job again, and look at the server's log and memory if it comes again"
        )

    def stop_serving(self, reason: str) -> None:
        """Answer every request of the job with ``reason`` from now on."""
        with self.lock:
            self.superseded = reason
            self.broken = self.broken or reason
            self.moved.notify_all()

    def _note_evicted(self) -> None:
        for name, ids in self.store.evicted:
            if self.persistence is not None:
                self.persistence.append(WireMessage({"op": "evicted", "table": name}, [ids]))
            self.lsn += 1
        self.store.evicted.clear()

    def _apply_begin(self, frame: WireMessage) -> dict[str, Any]:
        self.store.begin(frame.arrays[0] if frame.arrays else np.empty(0, np.float32))
        return {}

    def _apply_push(self, frame: WireMessage) -> dict[str, Any]:
        push = read_push(frame, self.layout) if frame.parsed is None else frame.parsed
        self.members.memberships[push.worker].seq = push.seq
        if push.blob is not None:
            kept = self.blobs.get(push.worker, [])
            self.blobs[push.worker] = [*kept[1 - BLOBS :], (push.seq, push.blob)]
        self.counts["pushes"] += 1
        staleness = self.mode.take(push, frame)
        return {"version": self.version, "staleness": staleness, "duplicate": False}

    def _apply_commit(self, frame: WireMessage) -> dict[str, Any]:
        self.mode.commit(frame.head["worker"], frame.head["seq"])
        return {}

    def _apply_fence(self, frame: WireMessage) -> dict[str, Any]:
        membership = self.members.memberships.get(frame.head["worker"], WorkerMembership())
        membership.fenced = True
        return {"committed": membership.committed}

    def _apply_drop(self, frame: WireMessage) -> dict[str, Any]:
        self._end(frame.head["worker"], frame.head["last"])
        return {}

    def _apply_leave(self, frame: WireMessage) -> dict[str, Any]:
        worker = frame.head["worker"]
        self._end(worker, self.members.memberships[worker].seq)
        return {}

    def _end(self, worker: int, last: int) -> None:
        if self.members.is_live(worker):
            self.members.end(worker, last)
            self.mode.discard(worker, last)
            self.mode.settle()
            self._finish_passes()

    def _apply_freeze(self, frame: WireMessage) -> dict[str, Any]:
        self.mode.frozen = True
        last = self.members.last_step(frame.head["worker"])
        return {"step": self.mode.entry(), "version": self.version, "last": last}

    def _apply_thaw(self, frame: WireMessage) -> dict[str, Any]:
        self.mode.frozen = False
        self.mode.settle()
        return {}

    def _apply_enter(self, frame: WireMessage) -> dict[str, Any]:
        worker = frame.head["worker"]
        self._end(worker, frame.head["last"])
        self.members.enter(worker, frame.head["step"], self.store.passes)
        return {}

    def _apply_new_pass(self, frame: WireMessage) -> dict[str, Any]:
        membership = self.membership(frame.head["worker"])
        membership.passes, membership.pass_after = frame.head.get("passes") or membership.passes + 1, membership.seq
        self._finish_passes()
        return {"passes": self.store.passes}

    def _finish_passes(self) -> None:
        """Finish each pass that some worker has completed and whose last push by that worker is applied.

        So a pass ends after the same step on every server, in whatever order the worker's announcement and the other
        workers' pushes arrive.
        """
        memberships = self.members.memberships.items()
        over = [
            membership.passes - (not self.mode.applied(worker, membership.pass_after))
            for worker, membership in memberships
        ]
        while self.store.passes < max(over, default=0):
            self.store.new_pass()

    def _apply_evicted(self, frame: WireMessage) -> dict[str, Any]:
        self.store.remove(frame.head["table"], frame.arrays[0])
        return {}

    # ---- for persistence, under the lock ----

    def facts(self) -> Sequence[WireMessage]:
        """Return the state except rows and blocks: one message of numbers, one per blob, and one per pending push."""
        plain = {"lsn": self.lsn, "version": self.version, "frozen": self.mode.frozen, "broken": self.broken}
        plain["loss"] = self.mode.loss
        plain |= {"members": self.members.facts(), "staleness": self.mode.staleness.facts()}
        plain |= {"store": self.store.facts(), "counts": dict(self.counts)}
        blobs = [
            WireMessage({"kind": "blob", "worker": worker, "seq": seq}, [content])
            for worker, kept in self.blobs.items()
            for seq, content in kept
        ]
        return [WireMessage({"kind": "facts", **plain}), *blobs, *self.pending()]

    def pending(self) -> list[WireMessage]:
        """Return the pushes that were received and not applied yet."""
        return self.mode.pending()

    def restore_facts(self, facts: Sequence[WireMessage]) -> None:
        """Restore what ``facts`` returned, for the same job on the same server."""
        plain = facts[0].head
        self.lsn, self.broken = plain["lsn"], plain["broken"]
        self.counts = dict(plain["counts"])
        self.members.memberships = JobWorkers.of(plain["members"]).memberships
        self.mode.version, self.mode.frozen = plain["version"], plain["frozen"]
        self.mode.staleness, self.mode.loss = Staleness.of(plain["staleness"]), plain.get("loss")
        self.store.restore(plain["store"])
        for frame in facts[1:]:
            if frame.head["kind"] == "blob":
                self.blobs.setdefault(frame.head["worker"], []).append((frame.head["seq"], frame.arrays[0]))
            else:
                self.mode.hold(read_push(frame, self.layout), frame)

    def load_facts(self, facts: Sequence[WireMessage]) -> None:
        """Load the part of a checkpoint's facts that belongs to its rows and blocks; this job's version is kept."""
        self.store.restore({**facts[0].head["store"], "begun": True, "expired": {}})
        self.members.resume_passes(self.store.passes)

    def set_floors(self, floors: Mapping[str, Mapping[int, int]], dense: int) -> None:
        """Begin a replay, in which changes up to these LSNs are already restored; empty floors end the replay."""
        self.store.set_floors(floors, dense)

    def forget(self) -> None:
        """Drop all rows and blocks."""
        self.store.forget()


def _changes(state: ServerState) -> dict[str, Callable[[WireMessage], dict[str, Any]]]:
    prefix = "_apply_"
    return {name.removeprefix(prefix): getattr(state, name) for name in dir(type(state)) if name.startswith(prefix)}
