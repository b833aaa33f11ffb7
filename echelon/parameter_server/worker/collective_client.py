"""``CollectiveClient``: tables in the workers, each of which holds some buckets; all read and update together.

A step has two exchanges: rows before the forward pass; then gradients, and with them the ids of the next batch. Other
lookups (of the first steps, of ids that the model computes, of an evaluation) take two exchanges each. Each message
begins with a head that says what its sender is doing, so that workers that do different things find out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError, MismatchError
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.request import Floats, Ids, PushRequest, finite
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.worker import client
from echelon.parameter_server.worker.client import IdPartition, PullFuture, PullVersions, WorkerUpdate
from echelon.parameter_server.worker.in_process import InProcessChannel
from echelon.parameter_server.worker.row_exchange import Bytes, RowExchange

#: What a worker does in an exchange.
BEGIN, LOOKUP, READ, ROWS, FORWARD_END, PUSH = range(6)
_WORDS = {
    BEGIN: "begins a step",
    LOOKUP: "looks up table {table!r} (lookup {number} of its step)",
    READ: "reads table {table!r} outside of a step",
    ROWS: "reads rows",
    FORWARD_END: "has looked up all the rows of its step",
    PUSH: "has ended its step",
}


class Head(NamedTuple):
    """The numbers at the head of a message.

    number:  number of the lookup in its step
    flag:    in BEGIN 1 if the ids that were asked ahead are those of the batch; in PUSH the number of other lookups
    passes:  finished passes over the data
    error:   length of the error that takes the place of the message; 0: none
    weight:  bits of the weight of a push
    """

    op: int
    table: int = -1
    number: int = 0
    flag: int = 0
    passes: int = 0
    error: int = 0
    weight: int = 0


_PLAIN = len(Head._fields)


@dataclass
class Received:
    """A message of one worker.

    numbers: by table, the number of ids (in BEGIN, of rows in use), of ids asked ahead, and the bits of the rate
    """

    head: Head
    numbers: NDArray[np.int64]
    content: Bytes


@dataclass
class ExchangedPull(PullFuture):
    """The rows of a lookup, which have arrived."""

    frames: list[WireMessage] = field(default_factory=list)

    def wait(self) -> list[WireMessage]:
        return self.frames


class CollectiveClient(client.ParameterServerClient):
    """The client of one worker for the tables that all workers hold together.

    shard:  the rows of this worker's buckets
    """

    def __init__(self, job: JobSpec, worker: int, exchange: RowExchange, shard: ServerShard) -> None:
        super().__init__([InProcessChannel(shard.handle)], job, worker)
        self._exchange, self._shard = exchange, shard
        self._names = [table.name for table in job.tables]
        self._dims = [table.dim for table in job.tables]
        self._pushed_widths = [table.push_width for table in job.tables]
        self._numbers = np.zeros((3, len(self._names)), np.int64)
        self._nothing = [np.empty(0, np.int64)] * len(self._names)
        self._ahead: ExchangedPull | None = None
        self._asked = [self._nothing] * self.shards  # by worker and table: the ids that were asked ahead
        self._lookups = 0  # of this step, beside those that were asked ahead
        self._expects_lookups = True
        self._failure = ""  # sent to the other workers in the next exchange

    # ---- a step ----

    def ask_ahead(self, wanted: Mapping[str, Ids]) -> PullFuture:
        """Send these ids with the next push; their rows come with the next ``begin_step``."""
        self._ahead = self._asking(wanted)
        return self._ahead

    def begin_step(self, used: PullFuture | None) -> bool:
        """Exchange the rows of the ids that were asked ahead; return True if all workers use theirs.

        used: the pull of this worker's batch, if it was asked ahead
        """
        if self.occupancy.is_counted:
            self._numbers[0] = [len(self._shard.tables[name]) for name in self._names]
        received = self._exchange_rows(Head(BEGIN, flag=int(used is not None)), self._asked)
        if used is not None:
            self._arrived(used, received)
        self._ahead, self._asked = None, [self._nothing] * self.shards
        if self.occupancy.is_counted:
            rows = [dict(zip(self._names, message.numbers[0].tolist(), strict=True)) for message in received]
            self.occupancy.note([WireMessage({"rows": each}) for each in rows])
        return all(message.head.flag for message in received)

    def end_forward(self) -> None:
        """Find workers that look up less than others, if some lookups of a step are not asked ahead."""
        if self._expects_lookups:
            self._exchange_parts(Head(FORWARD_END), [()] * self.shards)

    def pull(
        self, wanted: Mapping[str, Ids], *, step: int, dense: bool = False, peek: bool = False, state: bool = False
    ) -> PullFuture:
        """Read rows of distinct ids together with the other workers, which read rows of the same table."""
        self._lookups += not peek
        table = self._names.index(next(iter(wanted))) if len(wanted) == 1 else -1
        head = Head(READ if peek else LOOKUP, table=table, number=0 if peek else self._lookups)
        pulled = self._asking(wanted)
        parts = [self._cut(pulled.shares, owner) for owner in range(self.shards)]
        received = self._exchange_parts(head, parts, [[len(ids) for ids in part] for part in parts])
        asked = [self._split(message.content.view(np.int64), message.numbers[0]) for message in received]
        self._arrived(pulled, self._exchange_rows(Head(ROWS), asked))
        return pulled

    def push(self, update: WorkerUpdate, read: PullVersions | None = None) -> None:
        """Send gradients to the workers that hold their rows, and apply those that arrive."""
        self._check_finite(update)
        shares = {name: share for name, (share, _) in update.tables.items()}
        ahead = self._ahead.shares if self._ahead is not None else {}
        parts, counts = [], []
        for owner in range(self.shards):
            ids, later = self._cut(shares, owner), self._cut(ahead, owner)
            rows = [update.tables[name] for name in self._names if name in shares]
            parts.append([*ids, *later, *(share.cut(values, owner) for share, values in rows)])
            counts.append([*map(len, ids), *map(len, later)])
        self._numbers[2] = [_bits(update.rates[name]) for name in self._names]
        head = Head(PUSH, flag=self._lookups, weight=_bits(update.weight))
        received = self._exchange_parts(head, parts, counts)
        self.seq, self._lookups = self.seq + 1, 0
        self._expects_lookups = any(message.head.flag for message in received)
        pushes, self._asked = [], []
        for worker, message in enumerate(received):
            push, later = self._pushed(worker, message)
            pushes.append(push)
            self._asked.append(later)
        try:
            self._shard.apply_step(pushes)
        except EchelonError as error:
            self._failure = str(error)

    def _pushed(self, worker: int, message: Received) -> tuple[PushRequest, list[Ids]]:
        """Return a worker's push, and copies of the ids that it asks ahead."""
        counts, later = message.numbers[0], message.numbers[1]
        integers = 8 * int(counts.sum()), 8 * int(counts.sum() + later.sum())
        ids = self._split(message.content[: integers[0]].view(np.int64), counts)
        ahead = self._split(message.content[integers[0] : integers[1]].view(np.int64).copy(), later)
        widths = counts * self._pushed_widths
        rows = self._split(message.content[integers[1] :].view(np.float32), widths)
        used = [at for at in range(len(self._names)) if counts[at]]
        push = PushRequest(
            worker=worker,
            seq=self.seq - 1,
            weight=_number(message.head.weight),
            version=self._shard.version,
            ids={self._names[at]: ids[at] for at in used},
            rows={self._names[at]: rows[at].reshape(-1, self._pushed_widths[at]) for at in used},
            rates={self._names[at]: _number(int(message.numbers[2, at])) for at in used},
            limits=self.occupancy.limits(self.worker),
        )
        return push, ahead

    def _check_finite(self, update: WorkerUpdate) -> None:
        for name, (_, rows) in update.tables.items():
            flat = rows.reshape(-1)
            if not np.isfinite(np.dot(flat, flat)) and not finite(rows):
                self._failure = (
                    f"worker {self.worker}'s gradient of table '{name}' in step {self.seq + 1} is NaN or infinite; "
                    "nothing of it was applied"
                )

    def new_pass(self) -> None:
        """End a pass over the data; messages say how many, so that workers that differ find out."""
        with self._shard.lock:
            self._shard.store.new_pass()

    # ---- messages ----

    def _exchange_parts(
        self, head: Head, parts: Sequence[Sequence[NDArray[Any]]], counts: Sequence[Sequence[int]] = ()
    ) -> list[Received]:
        """Send each worker some arrays.

        counts: for each worker, the numbers of ids of the tables in its message
        """
        sizes = [sum(part.nbytes for part in each) for each in parts]
        messages = self._outgoing(head, sizes, counts)
        for message, each in zip(messages, parts if messages else (), strict=True):
            begin = 0
            for part in each:
                message[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)
                begin += part.nbytes
        return self._swapped(head)

    def _exchange_rows(self, head: Head, asked: Sequence[Sequence[Ids]]) -> list[Received]:
        """Send each worker the rows of the ids that it has asked for."""
        sizes = [sum(4 * len(ids) * dim for ids, dim in zip(each, self._dims, strict=True)) for each in asked]
        messages = self._outgoing(head, sizes)
        for message, each in zip(messages, asked if messages else (), strict=True):
            begin = 0
            for name, ids, dim in zip(self._names, each, self._dims, strict=True):
                end = begin + 4 * len(ids) * dim
                if len(ids):
                    self._shard.tables[name].pull(ids, message[begin:end].view(np.float32).reshape(-1, dim))
                begin = end
        return self._swapped(head)

    def _outgoing(self, head: Head, sizes: Sequence[int], counts: Sequence[Sequence[int]] = ()) -> list[Bytes]:
        """Write the heads of the next messages; return memory for what follows, nothing if this worker has failed."""
        failure, start = self._failure.encode(), 8 * (_PLAIN + self._numbers.size)
        head = head._replace(passes=self._shard.store.passes, error=len(failure))
        sizes = [len(failure)] * self.shards if failure else sizes
        messages = self._exchange.outgoing([start + size for size in sizes])
        for worker, message in enumerate(messages):
            integers = message[:start].view(np.int64)
            integers[:_PLAIN], integers[_PLAIN:] = head, self._numbers.reshape(-1)
            if counts:
                integers[_PLAIN : _PLAIN + len(counts[worker])] = counts[worker]
            if failure:
                message[start:] = np.frombuffer(failure, np.uint8)
        return [] if failure else [message[start:] for message in messages]

    def _swapped(self, head: Head) -> list[Received]:
        """Exchange the messages. Raises the error of a worker that has failed, or if workers do different things."""
        found = [self._read(content) for content in self._exchange.swap(head.op)]
        for message in found:
            if message.head.error:
                raise EchelonError(bytes(message.content[: message.head.error]).decode(errors="replace"))
        own = found[self.worker].head
        for worker, message in enumerate(found):
            if message.head[:3] != own[:3]:
                raise self._different(own, worker, message.head)
            if message.head.passes != own.passes:
                raise MismatchError(
                    f"worker {self.worker} has ended {own.passes} passes over the data, worker {worker} "
                    f"{message.head.passes}: call engine.served.new_pass() on every worker, after the same step"
                )
        return found

    def _read(self, content: Bytes) -> Received:
        start = 8 * (_PLAIN + self._numbers.size)
        integers = content[:start].view(np.int64)
        numbers = integers[_PLAIN:].reshape(self._numbers.shape)
        return Received(Head(*integers[:_PLAIN].tolist()), numbers, content[start:])

    def _different(self, own: Head, worker: int, theirs: Head) -> MismatchError:
        first, second = sorted([(self.worker, own), (worker, theirs)])
        said = [f"worker {number} {self._words(head)}" for number, head in (first, second)]
        return MismatchError(
            f"workers use sparse tables differently in step {self.seq + 1}: {said[0]}, {said[1]}; with tables in the "
            "workers (ps='collective') each makes the same lookups in the same order: call the model on all workers, "
            "whatever its data, or use servers (ps='sync')"
        )

    def _words(self, head: Head) -> str:
        table = self._names[head.table] if 0 <= head.table < len(self._names) else "tables"
        return _WORDS.get(head.op, "does something unknown").format(table=table, number=head.number)

    # ---- arrays ----

    def _asking(self, wanted: Mapping[str, Ids]) -> ExchangedPull:
        shares = {name: IdPartition.of(ids, self.shards) for name, ids in wanted.items()}
        dims = dict(zip(self._names, self._dims, strict=True))
        return ExchangedPull(shares, {name: dims[name] for name in wanted}, [], self.seq)

    def _cut(self, shares: Mapping[str, IdPartition], owner: int) -> list[Ids]:
        """Return the ids of one owner for each table of the job."""
        return [
            shares[name].cut(shares[name].ids, owner) if name in shares else self._nothing[at]
            for at, name in enumerate(self._names)
        ]

    def _split(self, values: NDArray[Any], counts: NDArray[np.int64]) -> list[NDArray[Any]]:
        if len(counts) == 1:
            return [values]
        ends = np.cumsum(counts).tolist()
        return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _arrived(self, pulled: PullFuture, received: Sequence[Received]) -> None:
        """Set the rows of a pull: those of its tables in the order in which it asked for them."""
        assert isinstance(pulled, ExchangedPull)
        frames = []
        for owner, message in enumerate(received):
            widths = [len(ids) * dim for ids, dim in zip(self._cut(pulled.shares, owner), self._dims, strict=True)]
            rows = dict(zip(self._names, self._split(message.content.view(np.float32), np.array(widths)), strict=True))
            parts = [rows[name] for name in pulled.shares]
            frames.append(WireMessage({}, [parts[0] if len(parts) == 1 else np.concatenate(parts or [_NO_ROWS])]))
        pulled.frames = frames

    # ---- between steps: nothing is ever under way ----

    def collect(self, leave: int = 0) -> list[Floats]:
        return []

    def settle(self) -> None: ...

    def refresh(self, step: int, *, dense: bool, peek: bool) -> PullFuture:
        return self._asking({})

    def leave(self) -> None: ...

    def close(self) -> None:
        super().close()
        self._exchange.close()
        self._shard.close()


_NO_ROWS: Floats = np.empty(0, np.float32)


def _bits(number: float) -> int:
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])
