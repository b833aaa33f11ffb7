"""A worker's side of all servers: one request to each, their answers put together."""

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
from echelon.parameter_server.protocol.job_spec import JobSpec, TableSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.occupancy import Occupancy
from echelon.parameter_server.table import partition

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class ChannelProtocol(Protocol):
    """An ordered way to one server."""

    def send(self, frame: WireMessage) -> Future[WireMessage]: ...

    def call(self, frame: WireMessage) -> WireMessage: ...

    def close(self) -> None: ...


@dataclass
class IdPartition:
    """How the ids of one table fall to the servers: ``order`` sorts them by server, ``counts`` says how many each."""

    ids: Ids
    order: Ids | None  # None: all on one server, as they are
    counts: list[int]

    @classmethod
    def of(cls, ids: Ids, servers: int) -> IdPartition:
        if servers == 1:
            return cls(ids, None, [len(ids)])
        order, counts = partition(ids, servers)
        return cls(ids[order], order, [int(count) for count in counts])

    def cut(self, values: NDArray[Any], server: int) -> NDArray[Any]:
        """The server's part of ``values``, which are in this share's own order."""
        start = sum(self.counts[:server])
        return values[start : start + self.counts[server]]


@dataclass(frozen=True)
class PullVersions:
    """The point in the job at which a worker has read its weights.

    versions: of the servers
    seq:      number of the worker's own pushes that were sent before, and so are a part of what was read
    """

    versions: list[int]
    seq: int

    def version(self, server: int, seq: int) -> int:
        """Return the version that push ``seq`` would find on ``server`` if no other worker had pushed since."""
        return self.versions[server] + seq - self.seq


@dataclass
class PullFuture:
    """What the servers will answer to a pull.

    seq:  number of this worker's pushes that were sent before
    note: takes the answers' heads, once
    loss: mean over all workers of the step before, in sync mode
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

    def rows(self) -> dict[str, Floats]:
        """By table, the rows in the order in which their ids were asked for. Waits for the answers."""
        frames = self.wait()
        at = [0] * len(frames)
        found: dict[str, Floats] = {}
        for name, share in self.shares.items():
            width = self.widths[name]
            parts = []
            for server, frame in enumerate(frames):
                size = share.counts[server] * width
                parts.append(frame.arrays[0][at[server] : at[server] + size].reshape(-1, width))
                at[server] += size
            found[name] = _in_place(parts, share.order)
        return found


def _in_place(parts: list[Floats], order: Ids | None) -> Floats:
    if order is None:
        return parts[0]
    rows = np.empty((len(order), parts[0].shape[1]), np.float32)
    rows[order] = np.concatenate(parts)
    return rows


@dataclass
class WorkerUpdate:
    """What a worker has to say after a step.

    tables:  by name, the share of its ids and their gradients (or changes) in the share's order
    dense:   for each server, its blocks' gradients; empty when dense parameters do not live there
    pulled:  what rows and blocks were when they were read, where delays are compensated
    loss:    the worker's own, in sync mode
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
    """Speaks to every server of a job for one worker. Not for several threads at once."""

    def __init__(self, links: Sequence[ChannelProtocol], job: JobSpec, worker: int) -> None:
        self.links, self.job, self.worker = list(links), job, worker
        self._tables: dict[str, TableSpec] = {table.name: table for table in job.tables}
        self.seq = 0  #: of the next push
        self._moment = PullVersions([0] * len(self.links), 0)  # at which the dense blocks were read
        self._under_way: deque[list[Future[WireMessage]]] = deque()
        self._newest: list[Floats] = []  # the blocks' values of the last answered push that asked for them
        self._committed = -1
        self.occupancy = Occupancy(job.tables, len(self.links))
        self.staleness: list[int] = []  #: of the pushes answered since it was last emptied

    # ---- coming and going ----

    def hello(self) -> list[dict[str, Any]]:
        """What each server knows of this worker."""
        return [a.head for a in self._all({"op": "hello", "session": self.job.session})]

    def open(self) -> None:
        """Tell all servers what the job is."""
        self._all({"op": "open", "job": self.job.to_json()})

    def begin(self, dense: Sequence[Floats]) -> None:
        """Give the servers the first values of their blocks, and let them answer. For one worker to do."""
        head = {"op": "begin", "worker": self.worker}
        sent = [link.send(WireMessage(head, [values])) for link, values in zip(self.links, dense, strict=True)]
        self._gather(sent)

    def leave(self) -> None:
        """This worker is done."""
        self.settle()
        self._all({"op": "leave"})

    def ask(self, **head: Any) -> list[WireMessage]:
        """The same small question to every server."""
        return self._all(head)

    def close(self) -> None:
        for link in self.links:
            link.close()

    # ---- reading ----

    def pull(
        self, wanted: Mapping[str, Ids], *, step: int, dense: bool = False, peek: bool = False, state: bool = False
    ) -> PullFuture:
        """Ask for rows (unique ids), and for the dense blocks. The answers come while the caller does other things.

        ``step``: the step that they are for: servers answer when it may begin. ``peek``: now, whatever the step.
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
            }
            ids = [share.cut(share.ids, server) for share in shares.values()]
            frames.append(WireMessage(head, [_joined(ids, np.dtype(np.int64))]))
        return PullFuture(shares, widths, self._send("pull", frames), self.seq, self.occupancy.note)

    def _width(self, name: str, state: bool) -> int:
        from echelon.strategy.table_rules import state_width

        table = self._tables[name]
        return table.dim + (state_width(table.rule, table.dim) if state else 0)

    # ---- writing ----

    def push(self, update: WorkerUpdate, read: PullVersions | None = None) -> None:
        """Send a step's update to every server; their answers are read later. ``read``: when its rows were."""
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
        """Read the answers to pushes until only ``leave`` are under way; the newest values of the blocks, if any.

        Others may have been answered, too. They are left: what a step sees must not depend on who was quick.
        """
        while len(self._under_way) > leave:
            since, included = monotonic(), self.seq - len(self._under_way) + 1
            answers = self._gather(self._under_way.popleft())
            activity.served("push", since)
            self.occupancy.note(answers)
            self.staleness += [int(answer.head.get("staleness", 0)) for answer in answers]
            if all(answer.arrays for answer in answers):
                self._newest = [answer.arrays[0] for answer in answers]
                self._moment = PullVersions([int(answer.head["version"]) for answer in answers], included)
        newest, self._newest = self._newest, []
        return newest

    def refresh(self, step: int, *, dense: bool, peek: bool) -> PullFuture:
        """Wait until every push counts, then read the blocks; what older answers brought is dropped."""
        self.settle()
        pulled = self.pull({}, step=step, dense=dense, peek=peek)
        pulled.wait()
        self._newest = []
        self._moment = pulled.moment or self._moment
        return pulled

    def settle(self) -> None:
        """Wait until every push has been answered, and let it count."""
        newest = self.collect()
        self._newest = newest
        commit = self._commit()
        if commit is not None:
            self._all({"op": "commit", "seq": commit})

    def _commit(self) -> int | None:
        """The last push, when all servers have it and have not been told so. One server needs no telling."""
        if self.job.mode != "sync" or len(self.links) == 1 or self._committed == self.seq - 1:
            return None
        self._newest = self.collect()
        self._committed = self.seq - 1
        return self._committed

    def resume_at(self, seq: int) -> None:
        """This worker's next push is the one with this number."""
        self.seq, self._committed = seq, seq - 2  # whether the one before was committed is not known: say it again

    # ---- inside ----

    def _send(self, kind: str, frames: Sequence[WireMessage]) -> list[Future[WireMessage]]:
        """To each server its own."""
        since = monotonic() if activity.recorder is not None else 0.0
        answers = [link.send(frame) for link, frame in zip(self.links, frames, strict=True)]
        if activity.recorder is not None:
            activity.recorder.asked(kind, since, frames, answers)
        return answers

    def _all(self, head: dict[str, Any]) -> list[WireMessage]:
        return self._gather([link.send(WireMessage({**head, "worker": self.worker})) for link in self.links])

    def _gather(self, answers: Sequence[Future[WireMessage]]) -> list[WireMessage]:
        """All answers; of several errors, one that is not merely about a lost connection."""
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
