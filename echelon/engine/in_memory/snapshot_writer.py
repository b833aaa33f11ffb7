"""``SnapshotWriter``: copies a rank's share of the state into the memory of its host's launcher after steps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from echelon.base.console import say
from echelon.base.formatting import size as size_text
from echelon.checkpoint.in_memory import snapshot_wire
from echelon.checkpoint.in_memory.replicator import TROUBLE, Replicator
from echelon.checkpoint.in_memory.snapshot_buffer import SnapshotBuffer
from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.checkpoint.in_memory.snapshot_pieces import PieceHolders, PlacedPiece
from echelon.checkpoint.in_memory.snapshot_wire import SnapshotRefusedError
from echelon.distributed.collectives import gather_json
from echelon.distributed.world import World
from echelon.engine.in_memory.device_copy import DeviceCopy
from echelon.engine.in_memory.snapshot_layout import SnapshotLayout

if TYPE_CHECKING:
    from echelon.engine.checkpointing import CheckpointManager

_ROOM = 64 << 10  # bytes for facts, in addition to twice their present size


@dataclass(frozen=True)
class SnapshotTarget:
    """A snapshot buffer in another process that receives the first ``count`` bytes of every copy."""

    line: snapshot_wire.SnapshotClient
    number: int
    count: int


@dataclass
class PendingSnapshot:
    """A copy whose tensors are in their slot or are still being copied there."""

    buffer: SnapshotBuffer
    targets: list[SnapshotTarget]
    seq: int
    step: int
    facts: dict[str, Any]
    text: bytes = b""

    def seal(self) -> int:
        """Write the facts, mark the slot as complete, and return the length of the facts in bytes.

        Raises ``SnapshotRefusedError`` if the facts do not fit.
        """
        self.text = self.text or _encoded(self.facts)
        if len(self.text) > self.buffer.room:
            raise SnapshotRefusedError(
                f"{len(self.text)} bytes of metadata do not fit into the {self.buffer.room} left for them"
            )
        self.buffer.seal(self.seq % 2, self.seq, self.step, self.text)
        return len(self.text)

    def send(self) -> None:
        for target in self.targets:
            connection = target.line.connection
            head = {"op": "keep", "bank": target.number, "seq": self.seq, "step": self.step, "bytes": target.count}
            snapshot_wire.send(connection, {**head, "facts": self.text.decode()})
            if target.count:
                connection.sendfile(self.buffer.file, self.buffer.data(self.seq % 2), target.count)
        for target in self.targets:
            target.line.answer()


class SnapshotWriter:
    """Writes the in-memory snapshots of one rank.

    new_group:  creates the process group on which ranks vote whether all copies succeeded
    statistics: returns True if each replica has its own batch-norm statistics
    """

    def __init__(
        self,
        where: SnapshotHosts,
        world: World,
        manager: CheckpointManager,
        new_group: Callable[[], dist.ProcessGroup],
        statistics: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._where = where
        self._world = world
        self._manager = manager
        self._say = say
        self._new_group, self._statistics = new_group, statistics
        self._seq, self._step, self._stopped = 0, -1, False
        self._replicator: Replicator | None = None
        self._lines: dict[int, snapshot_wire.SnapshotClient] = {}
        self._form: SnapshotLayout | None = None
        self._buffer: SnapshotBuffer | None = None
        self._targets: list[SnapshotTarget] = []
        self._not_freed: list[tuple[int, int]] = []  # new buffers: host, number
        self._facts_length = 0  # bytes of the facts of the last copy from a GPU
        self._transfer = DeviceCopy(world.device)

    def after(self, step: int, at_once: bool = False) -> None:
        """Take a snapshot if one is due; called after each update, on all ranks.

        at_once: True to ignore the interval
        """
        if self._stopped or step == self._step or not (at_once or step % self._where.every == 0):
            return
        if not self._manager.together:
            return
        if self._replicator is None:
            self._replicator = self._begin()
        elif failing := self._replicator.wait():
            self._stop(failing, self._replicator.failure)
            return
        self._step = step
        try:
            if self._replicator.failure is None:
                self._free_older()
                self._replicator.hand(self._copy(step))
                return
        except TROUBLE as error:
            self._replicator.failure = str(error) or type(error).__name__
        self._replicator.hand(lambda: None)  # the vote informs the other ranks

    def hold(self) -> None:
        """Make the next update wait until the device has read the tensors that the update changes."""
        self._transfer.hold()

    def close(self) -> None:
        if self._replicator is not None:
            self._replicator.close()
        for line in self._lines.values():
            line.close()
        self._stopped = True
        self._lines = {}
        self._targets = []
        self._form = None
        if self._buffer is not None:
            self._transfer.forget()
            self._buffer.close()
            self._buffer = None

    def _begin(self) -> Replicator:
        """Start snapshots on all ranks together: find the holders of each piece and log the memory needed."""
        alone = self._world.size == 1
        tensors, _ = self._manager.own_tensors()
        self._holders = PieceHolders(tensors, self._world.rank, self._world.control)
        replicator = Replicator(None if alone else self._new_group(), self._world.rank, self._world.timeout)
        try:
            self._inspect()
        except TROUBLE as error:
            replicator.failure = str(error) or type(error).__name__
        form = self._form
        local = [form.nbytes, form.sent] if form is not None and replicator.failure is None else None
        everyone: list[Any] = gather_json(local, self._world.control) if self._world.control is not None else [local]
        if None not in everyone:
            self._say(self._amount(everyone))
        return replicator

    def _amount(self, everyone: list[list[int]]) -> str:
        """Return a log line on the memory needed on this host.

        everyone: for each rank, bytes that it copies, and bytes that it sends to the next host
        """
        here, before = self._where.here, (self._where.here - 1) % len(self._where.hosts)
        hosts = [self._where.host_of(rank) for rank in range(self._world.size)]
        own = sum(copied for host, (copied, _) in zip(hosts, everyone, strict=True) if host == here)
        kept = sum(sent for host, (_, sent) in zip(hosts, everyone, strict=True) if host == before != here)
        every = "every step" if self._where.every == 1 else f"every {self._where.every} steps"
        return f"in-memory snapshots: {size_text(2 * (own + kept))} on this host after {every}"

    def _inspect(self) -> None:
        """Find the tensors; open new buffers if names or sizes have changed."""
        manager = self._manager
        tensors, _ = manager.own_tensors()
        tensors |= manager.own_state()
        if self._statistics():
            tensors |= manager.own_statistics()
        self._sources = manager.sources
        form = SnapshotLayout(tensors, self._sources, self._holders, self._where, self._world.rank)
        before, self._form = self._form, form
        if before is None or self._buffer is None or before.table != form.table:
            self._open(form, len(_encoded(self._facts())))

    def _facts(self) -> dict[str, Any]:
        """Return the facts of this rank; rank 0 adds the shared facts, which are equal on all ranks."""
        local, shared = self._manager.own_facts(self._sources.optimizers())
        known: dict[str, Any] = {"mine": local}
        if self._world.rank == 0:
            known |= {"shared": shared, "hosts": len(self._where.hosts)}
        return known

    def _open(self, form: SnapshotLayout, facts: int) -> None:
        room, old = _ROOM + 2 * facts, self._buffer
        self._targets, self._not_freed, self._buffer = [], [], None
        here, opened = self._opened(self._where.here, form.table, room, form.nbytes)
        self._buffer = _mapped(self._where.pid, int(opened["fd"]), room, form.nbytes)
        if self._buffer is None:  # this process cannot map the launcher's memory, so it sends the data
            self._buffer = SnapshotBuffer.make(room, form.nbytes)
            self._targets.append(SnapshotTarget(here, int(opened["bank"]), form.nbytes))
        if (neighbour := self._where.neighbour) is not None:
            line, opened = self._opened(neighbour, form.sent_table, room, form.sent)
            self._targets.append(SnapshotTarget(line, int(opened["bank"]), form.sent))
        self._slots: list[list[Tensor]] = form.inside(self._buffer)
        self._transfer.register(self._buffer)
        if old is not None:
            old.close()

    def _opened(
        self, host: int, table: list[PlacedPiece], room: int, nbytes: int
    ) -> tuple[snapshot_wire.SnapshotClient, dict[str, Any]]:
        line = self._lines.get(host)
        if line is None:
            line = self._lines[host] = self._where.call(host)
        opened = line.ask(
            "open",
            round=self._where.round,
            engine=self._where.engine,
            world=self._world.size,
            rank=self._world.rank,
            room=room,
            nbytes=nbytes,
            table=[each.to_json() for each in table],
        )
        self._not_freed.append((host, int(opened["bank"])))
        return line, opened

    def _free_older(self) -> None:
        """Drop older buffers, because all ranks have a complete copy in their newest ones."""
        for host, number in self._not_freed if self._seq else ():
            self._lines[host].ask("settle", bank=number)
        self._not_freed = [] if self._seq else self._not_freed

    def _copy(self, step: int) -> Callable[[], None]:
        """Fill the next slot and return a function that completes the copy in the background."""
        if not self._sources.unchanged() and self._seq:
            self._inspect()
        form, facts = self._form, self._facts()
        assert form is not None
        assert self._buffer is not None
        text = _encoded(facts) if self._transfer.at_once else b""  # a GPU may still compute some facts
        if (length := len(text) or self._facts_length + 1024) > self._buffer.room:
            self._open(form, length)
        form.refresh(self._manager.random_tensors())
        self._seq += 1
        slot = self._seq % 2
        self._buffer.break_seal(slot)
        self._transfer.copy(self._slots[slot], form)
        complete = PendingSnapshot(self._buffer, self._targets, self._seq, step, facts, text)
        if self._transfer.at_once:
            complete.seal()
        return partial(self._complete, complete)

    def _complete(self, copy: PendingSnapshot) -> None:
        if not self._transfer.at_once:
            self._transfer.wait()
            self._facts_length = copy.seal()
        copy.send()

    def _stop(self, failing: list[int], failure: str | None) -> None:
        """Stop taking snapshots and log why. Training continues, and the last complete snapshots stay."""
        self._stopped = True
        if failure is not None and self._world.rank != 0:
            say(f"in-memory snapshots disabled by rank {self._world.rank}: {failure}")
        ranks = ", ".join(map(str, failing))
        self._say(
            f"in-memory snapshots disabled from step {self._step + 1} on: rank {ranks}: {failure or 'see its log'}"
        )


def _encoded(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":"), default=float).encode()


def _mapped(pid: int, number: int, room: int, nbytes: int) -> SnapshotBuffer | None:
    """Map the launcher's memory file; return None if this process cannot open it or it is not the expected file."""
    path = f"/proc/{pid}/fd/{number}"
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith("/memfd:echelon-copies"):
            return None
        fd = os.open(path, os.O_RDWR)
        if os.fstat(fd).st_size == SnapshotBuffer.size(room, nbytes):
            return SnapshotBuffer(fd, room, nbytes)
        os.close(fd)
    return None
