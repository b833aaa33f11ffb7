"""The client of all servers for one worker: it splits requests over the servers and joins their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import PeerLost
from echelon.distributed.activity import activity
from echelon.parameter_server.protocol.job_spec import BLOBS, JobSpec, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.occupancy import Occupancy
from echelon.parameter_server.table import narrow, partition, widen

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class ChannelProtocol(Protocol):
    """Interface of an ordered channel to one server."""

    def send(self, frame: WireMessage) -> Future[WireMessage]: ...

    def call(self, frame: WireMessage) -> WireMessage: ...

    def close(self) -> None: ...


@dataclass
class IdPartition:
    """The ids of one table sorted by server: ``order`` is the permutation, ``counts`` the number of ids per server."""

    ids: Ids
    order: Ids | None  # None: the ids were in this order before
    counts: list[int]

    @classmethod
    def of(cls, ids: Ids, servers: int) -> IdPartition:
        if servers == 1:
            return cls(ids, None, [len(ids)])
        order, counts = partition(ids, servers)
        return cls(ids if order is None else ids[order], order, counts.tolist())

    def cut(self, values: NDArray[Any], server: int) -> NDArray[Any]:
        """Return a server's part of ``values``, which are in the order of this partition."""
        start = sum(self.counts[:server])
        return values[start : start + self.counts[server]]


@dataclass(frozen=True)
class PullVersions:
    """The versions of the weights that a worker has read.

    versions: version of each server
    seq:      number of the worker's own pushes that were sent before the read, and so are included
    """

    versions: list[int]
    seq: int

    def version(self, server: int, seq: int) -> int:
        """Return the version that push ``seq`` would find on ``server`` if no other worker had pushed since."""
        return self.versions[server] + seq - self.seq


@dataclass
class PullFuture:
    """The pending answers of all servers to a pull.

    seq:  number of this worker's pushes that were sent before the pull
    note: callback that receives the answers, once
    loss: in sync mode, the mean loss of all workers in the previous step
    """

    shares: dict[str, IdPartition]
    widths: dict[str, int]
    answers: list[Future[WireMessage]]
    seq: int = 0
    note: Callable[[Sequence[WireMessage]], None] | None = None
    moment: PullVersions | None = None
    dense: list[Floats] = field(default_factory=list)
    loss: float | None = None

    def wait(self) -> list[WireMessage]:
        """Wait for the answers."""
        since = monotonic()
        frames = [answer.result() for answer in self.answers]
        if self.moment is None:
            activity.served("pull", since)
            self.moment = PullVersions([int(frame.head["version"]) for frame in frames], self.seq)
            self.dense = [frame.arrays[1] for frame in frames if len(frame.arrays) > 1]
            self.loss = frames[0].head.get("loss")
            if self.note is not None:
                self.note(frames)
        return frames

    def take_dense(self) -> list[Floats]:
        """Return the dense blocks, of which this object keeps none."""
        taken, self.dense = self.dense, []
        return taken

    def rows(self) -> dict[str, Floats]:
        """Wait for the answers, and return the rows by table, in the order of the requested ids."""
        frames = self.wait()
        arrays = [frame.arrays[0] for frame in frames]
        arrays = [widen(array) if array.dtype == np.uint16 else array for array in arrays]
        at = [0] * len(frames)
        found: dict[str, Floats] = {}
        for name, share in self.shares.items():
            width = self.widths[name]
            parts = []
            for server, array in enumerate(arrays):
                size = share.counts[server] * width
                parts.append(array[at[server] : at[server] + size].reshape(-1, width))
                at[server] += size
            found[name] = _in_place(parts, share.order)
        return found


def _in_place(parts: list[Floats], order: Ids | None) -> Floats:
    if order is None:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    rows = np.empty((len(order), parts[0].shape[1]), np.float32)
    rows[order] = np.concatenate(parts)
    return rows


@dataclass
class WorkerUpdate:
    """A worker's update after a step.

    tables:        by name, the partition of the ids, and their gradients (or changes) in the order of the partition
    dense:         gradients of each server's blocks; empty if servers do not hold the dense parameters
    pulled_rows:   by table, the rows as they were read; needed for delay compensation only
    pulled_dense:  the blocks as they were read; needed for delay compensation only
    loss:          the worker's own loss, in sync mode
    """

    weight: float
    tables: dict[str, tuple[IdPartition, Floats]]
    rates: dict[str, float] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    dense: list[Floats] = field(default_factory=list)
    kind: str = "gradient"
    pulled_rows: dict[str, Floats] = field(default_factory=dict)
    pulled_dense: list[Floats] = field(default_factory=list)
    values: bool = False  # answer with the blocks' new values
    blob: NDArray[np.uint8] | None = None
    loss: float = 0.0


class ParameterServerClient:
    """The client of one worker for every server of a job. It is not thread-safe.

    narrow: send rows and their gradients as bfloat16; default False
    """

    def __init__(self, links: Sequence[ChannelProtocol], job: JobSpec, worker: int, narrow: bool = False) -> None:
        self.links, self.job, self.worker, self._narrow = list(links), job, worker, narrow
        self._tables: dict[str, TableSpec] = {table.name: table for table in job.tables}
        self.shards = job.servers  #: number of servers, or of workers that hold the tables
        self.seq = 0  #: sequence number of the next push
        self._moment = PullVersions([0] * len(self.links), 0)  # of the dense blocks' last read
        self._under_way: deque[list[Future[WireMessage]]] = deque()
        self._newest: list[Floats] = []  # the blocks' values in the last answer to a push that requested them
        self._committed = -1
        self.occupancy = Occupancy(job.tables, self.shards)
        self._staleness: list[int] = []  # of the pushes answered since the list was last taken

    def take_staleness(self) -> list[int]:
        """Return the staleness of the pushes answered since the last call."""
        taken, self._staleness = self._staleness, []
        return taken

    # ---- start and end ----

    def hello(self) -> list[dict[str, Any]]:
        """Return what each server knows about this worker."""
        return [a.head for a in self._all({"op": "hello", "session": self.job.session})]

    def last_push(self, standing: Sequence[dict[str, Any]]) -> int | None:
        """Return this worker's last push that all servers have, -1 if there is none; None if the worker must join.

        Raises ``PeerLost`` if a server has lost its state while others have theirs.

        standing: the servers' answers to ``hello``
        """
        known = [s.get("opened") and s.get("session") == self.job.session for s in standing]
        seqs = [int(s["seq"]) if of_job else -1 for s, of_job in zip(standing, known, strict=True)]
        least, most = min(seqs), max(seqs)
        if most - least >= BLOBS:  # a server may lack the last pushes, but no more than may be under way at once
            raise PeerLost(
                f"server {seqs.index(least)} has lost its state: it has the pushes of worker {self.worker} up to "
                f"{least}, server {seqs.index(most)} up to {most}; start a new job from the last checkpoint"
            )
        if all(known) and not all(s["member"] for s in standing):
            return None
        return least

    def open(self) -> None:
        """Send the job description to all servers."""
        self._all({"op": "open", "job": self.job.to_json()})

    def begin(self, dense: Sequence[Floats]) -> None:
        """Send the servers the initial values of their blocks, and wait for the answers. One worker calls this."""
        head = {"op": "begin", "worker": self.worker}
        sent = [link.send(WireMessage(head, [values])) for link, values in zip(self.links, dense, strict=True)]
        self._gather(sent)

    def leave(self) -> None:
        """Tell all servers that this worker is done."""
        self.settle()
        self._all({"op": "leave"})

    def ask(self, **head: Any) -> list[WireMessage]:
        """Send the same small request to every server, and return the answers."""
        return self._all(head)

    def close(self) -> None:
        for link in self.links:
            link.close()

    # ---- reading ----

    def pull(
        self, wanted: Mapping[str, Ids], *, step: int, dense: bool = False, peek: bool = False, state: bool = False
    ) -> PullFuture:
        """Request rows of distinct ids, and the dense blocks; return a future, without waiting for the answers.

        step:   the step that the values are for; servers answer when the step may begin
        dense:  also request the dense blocks; default False
        peek:   answer at once, whatever the step; default False
        state:  also request the optimizer state of the rows; default False
        """
        shares = {name: IdPartition.of(ids, len(self.links)) for name, ids in wanted.items()}
        widths = {name: self._width(name, state) for name in wanted}
        commit = self._commit() if not peek else None
        frames = []
        for server in range(len(self.links)):
            head = {
                "op": "pull",
                "worker": self.worker,
                "step": step,
                "tables": {name: share.counts[server] for name, share in shares.items()},
                "dense": dense,
                "commit": commit,
                "peek": peek,
                "state": state,
                "narrow": self._narrow and not state,
            }
            ids = [share.cut(share.ids, server) for share in shares.values()]
            frames.append(WireMessage(head, [_joined(ids, np.dtype(np.int64))]))
        return PullFuture(shares, widths, self._send("pull", frames), self.seq, self.occupancy.note)

    def _width(self, name: str, state: bool) -> int:
        from echelon.strategy.sparse_update_rules import state_width

        table = self._tables[name]
        return table.dim + (state_width(table.rule, table.dim) if state else 0)

    # ---- writing ----

    def push(self, update: WorkerUpdate, read: PullVersions | None = None) -> None:
        """Send a step's update to every server; the answers are read later. ``read``: versions of the rows it used."""
        read = read or self._moment
        frames = [self._push_frame(update, s, read.version(s, self.seq)) for s in range(len(self.links))]
        self._under_way.append(self._send("push", frames))
        self.seq += 1

    def _push_frame(self, update: WorkerUpdate, server: int, version: int) -> WireMessage:
        shares = [share for share, _ in update.tables.values()]
        arrays: dict[str, NDArray[Any]] = {
            "ids": _joined([share.cut(share.ids, server) for share in shares], np.dtype(np.int64)),
            "rows": _flat([share.cut(rows, server) for share, rows in update.tables.values()]),
        }
        if update.dense:
            arrays["dense"] = update.dense[server]
        if update.pulled_rows:
            arrays["pulled_rows"] = _flat(
                [share.cut(update.pulled_rows[name], server) for name, (share, _) in update.tables.items()]
            )
        if self._narrow:
            arrays |= {name: narrow(arrays[name]) for name in ("rows", "pulled_rows") if name in arrays}
        if update.pulled_dense:
            arrays["pulled_dense"] = update.pulled_dense[server]
        if update.blob is not None and server == 0:
            arrays["blob"] = update.blob
        head = {
            "op": "push",
            "worker": self.worker,
            "seq": self.seq,
            "weight": update.weight,
            "version": version,
            "tables": {name: share.counts[server] for name, (share, _) in update.tables.items()},
            "lrs": update.rates,
            "limits": self.occupancy.limits(server),
            "groups": update.groups,
            "dense": bool(update.dense),
            "values": update.values,
            "commit": len(self.links) == 1,
            "kind": update.kind,
            "loss": update.loss,
            "has": list(arrays),
        }
        return WireMessage(head, list(arrays.values()))

    def collect(self, leave: int = 0) -> list[Floats]:
        """Read the answers to pushes until only ``leave`` are pending; return the newest values of the blocks, if any.

        Further answers that have arrived already are not read: the values that a step sees must not depend on timing.
        """
        while len(self._under_way) > leave:
            since, included = monotonic(), self.seq - len(self._under_way) + 1
            answers = self._gather(self._under_way.popleft())
            activity.served("push", since)
            self.occupancy.note(answers)
            self._staleness += [int(answer.head.get("staleness", 0)) for answer in answers]
            if all(answer.arrays for answer in answers):
                self._newest = [answer.arrays[0] for answer in answers]
                self._moment = PullVersions([int(answer.head["version"]) for answer in answers], included)
        newest, self._newest = self._newest, []
        return newest

    def refresh(self, step: int, *, dense: bool, peek: bool) -> PullFuture:
        """Wait until every push is committed, then read the blocks; values from older answers are dropped."""
        self.settle()
        pulled = self.pull({}, step=step, dense=dense, peek=peek)
        pulled.wait()
        self._newest = []
        self._moment = pulled.moment or self._moment
        return pulled

    def settle(self) -> None:
        """Wait until every push has been answered, and commit the pushes."""
        newest = self.collect()
        self._newest = newest
        commit = self._commit()
        if commit is not None:
            self._all({"op": "commit", "seq": commit})

    def _commit(self) -> int | None:
        """Return the last push if it must be committed, after all servers have it; else None.

        A single server needs no commit.
        """
        if self.job.mode != "sync" or len(self.links) == 1 or self._committed == self.seq - 1:
            return None
        self._newest = self.collect()
        self._committed = self.seq - 1
        return self._committed

    def resume_at(self, seq: int) -> None:
        """Set the sequence number of this worker's next push."""
        self.seq, self._committed = seq, seq - 2  # the previous push may not be committed, so commit it again

    # ---- internal ----

    def _send(self, kind: str, frames: Sequence[WireMessage]) -> list[Future[WireMessage]]:
        """Send each server its own message."""
        since = monotonic() if activity.recorder is not None else 0.0
        answers = [link.send(frame) for link, frame in zip(self.links, frames, strict=True)]
        if activity.recorder is not None:
            activity.recorder.record_request(kind, since, frames, answers)
        return answers

    def _all(self, head: dict[str, Any]) -> list[WireMessage]:
        return self._gather([link.send(WireMessage({**head, "worker": self.worker})) for link in self.links])

    def _gather(self, answers: Sequence[Future[WireMessage]]) -> list[WireMessage]:
        """Wait for all answers. Of several errors, one that is not a lost connection is raised first."""
        errors = [error for answer in answers if (error := answer.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        return [answer.result() for answer in answers]


def _joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _flat(parts: Sequence[Floats]) -> Floats:
    return _joined([part.reshape(-1) for part in parts], np.dtype(np.float32))
