"""Serves the snapshot buffers of one host from threads of the launcher.

Every connection must prove the key. Messages are JSON of bounded length and bytes for which memory is already
allocated; a connection that sends anything else is closed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echelon.base import network
from echelon.base.accept_loop import AcceptLoop
from echelon.base.job_secret import HandshakeError, admit
from echelon.checkpoint.in_memory import snapshot_wire
from echelon.checkpoint.in_memory.snapshot_buffer import SnapshotBuffer
from echelon.checkpoint.in_memory.snapshot_wire import SnapshotProtocolError, SnapshotRefusedError

_MOST_BYTES = 1 << 46
Reply = dict[str, Any]


@dataclass(frozen=True)
class RankSnapshot:
    """A rank's snapshot buffer; ``table``, from its writer, says which tensor is at which offset."""

    number: int
    round: int
    world: int
    rank: int
    engine: int
    table: list[Any]
    buffer: SnapshotBuffer


class SnapshotServer:
    """Listens on a free port of ``address`` from construction until ``close``."""

    def __init__(self, address: str, key: bytes | None) -> None:
        self._key = key
        self._kept: dict[int, RankSnapshot] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.address = _written(address, listener.getsockname()[1])
        network.raise_descriptor_limit()
        self._port = AcceptLoop(listener, self._serve, "echelon-memory")

    def close(self) -> None:
        """Close all connections and free all memory."""
        with self._lock:
            self._closed = True
            kept = list(self._kept.values())
            self._kept = {}
        self._port.close()
        self._port.cut()
        for each in kept:
            each.buffer.close()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(SnapshotBuffer.size(kept.buffer.room, kept.buffer.nbytes) for kept in self._kept.values())

    def _serve(self, caller: socket.socket, know: Callable[[], None]) -> None:
        with contextlib.suppress(
            OSError, HandshakeError, SnapshotProtocolError, ValueError
        ):  # ValueError: the buffer was closed
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished does not close
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._key is not None:
                admit(caller, self._key)
            know()
            while (message := snapshot_wire.receive(caller)) is not None:
                self._answer(caller, message)

    def _answer(self, caller: socket.socket, message: dict[str, Any]) -> None:
        ops: dict[Any, Callable[[socket.socket, dict[str, Any]], Reply | None]] = {
            "open": self._open,
            "keep": self._keep,
            "settle": self._free_older,
            "list": self._list,
            "describe": self._describe,
            "read": self._read,
        }
        op = message.get("op")
        if not isinstance(op, str) or op not in ops:
            raise SnapshotProtocolError("an unknown request")
        try:
            reply = ops[op](caller, message)
        except (SnapshotRefusedError, MemoryError) as error:
            reply = {"error": str(error)}
        except OSError as error:
            reply = {"error": error.strerror or str(error)}
        if reply is not None:
            snapshot_wire.send(caller, reply)

    def _open(self, _: socket.socket, message: dict[str, Any]) -> Reply:
        """Create a new buffer for a rank; its old buffers stay until ``settle``."""
        table = message.get("table")
        if not isinstance(table, list):
            raise SnapshotProtocolError("no table")
        room, nbytes = _whole(message, "room", snapshot_wire.LONGEST), _whole(message, "nbytes", _MOST_BYTES)
        round_number, world, rank, engine = (_whole(message, name) for name in ("round", "world", "rank", "engine"))
        buffer = SnapshotBuffer.make(room, nbytes)
        with self._lock:
            if self._closed:
                buffer.close()
                raise SnapshotRefusedError("the snapshot server is closed")
            kept = RankSnapshot(next(self._numbers), round_number, world, rank, engine, table, buffer)
            self._kept[kept.number] = kept
        return {"bank": kept.number, "fd": buffer.fd}

    def _keep(self, caller: socket.socket, message: dict[str, Any]) -> Reply:
        """Receive a snapshot whose bytes follow, from a rank on another host."""
        buffer = self._snapshot_of(message).buffer
        seq, step, count = (_whole(message, name) for name in ("seq", "step", "bytes"))
        facts = message.get("facts")
        if count > buffer.nbytes or not seq or not isinstance(facts, str) or len(facts.encode()) > buffer.room:
            raise SnapshotProtocolError("a snapshot that does not fit")
        slot = seq % 2
        buffer.break_seal(slot)
        begin = buffer.data(slot)
        caller.settimeout(snapshot_wire.REST)
        with memoryview(buffer.memory) as memory, memory[begin : begin + count] as into:
            snapshot_wire.fill(caller, into)
        caller.settimeout(None)
        buffer.seal(slot, seq, step, facts.encode())
        return {"seq": seq}

    def _free_older(self, _: socket.socket, message: dict[str, Any]) -> Reply:
        """Free older buffers: all ranks of this buffer's round have a complete snapshot in theirs."""
        of = self._snapshot_of(message)
        with self._lock:
            same = [kept for kept in self._kept.values() if kept.engine == of.engine]
            old = [kept for kept in same if kept.round < of.round]
            old += [k for k in same if (k.round, k.rank) == (of.round, of.rank) and k.number < of.number]
            for kept in old:
                del self._kept[kept.number]
        for kept in old:
            kept.buffer.close()
        return {}

    def _list(self, *_: Any) -> Reply:
        """Return every complete snapshot of this server."""
        with self._lock:
            return {"copies": [copy for kept in self._kept.values() for copy in _copies(kept)]}

    def _describe(self, _: socket.socket, message: dict[str, Any]) -> Reply:
        kept, seq = self._snapshot_of(message), _whole(message, "seq")
        sealed = kept.buffer.sealed(seq % 2)
        if sealed is None or sealed.seq != seq:
            raise SnapshotRefusedError("the snapshot no longer exists")
        return {"table": kept.table, "facts": json.loads(sealed.facts)}

    def _read(self, caller: socket.socket, message: dict[str, Any]) -> None:
        """Send a range of bytes of a snapshot."""
        kept, seq = self._snapshot_of(message), _whole(message, "seq")
        start, count = _whole(message, "start"), _whole(message, "bytes")
        buffer, slot = kept.buffer, seq % 2
        if start + count > buffer.nbytes:
            raise SnapshotRefusedError("the requested bytes lie outside the snapshot")
        sealed = buffer.sealed(slot)
        if sealed is None or sealed.seq != seq:
            raise SnapshotRefusedError("the snapshot no longer exists")
        snapshot_wire.send(caller, {"bytes": count})
        caller.settimeout(snapshot_wire.REST)
        if count:
            caller.sendfile(buffer.file, buffer.data(slot) + start, count)
        caller.settimeout(None)

    def _snapshot_of(self, message: dict[str, Any]) -> RankSnapshot:
        with self._lock:
            kept = self._kept.get(_whole(message, "bank"))
        if kept is None:
            raise SnapshotRefusedError("the snapshot buffer no longer exists")
        return kept


def _copies(kept: RankSnapshot) -> list[Reply]:
    found = [kept.buffer.sealed(slot) for slot in (0, 1)]
    return [
        {
            "bank": kept.number, "round": kept.round, "world": kept.world, "rank": kept.rank,
            "engine": kept.engine, "seq": sealed.seq, "step": sealed.step, "bytes": kept.buffer.nbytes,
        }
        for sealed in found if sealed is not None
    ]  # fmt: skip


def _whole(message: dict[str, Any], name: str, most: int = 1 << 62) -> int:
    value = message.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise SnapshotProtocolError(f"a missing or invalid '{name}'")
    return value


def _written(address: str, port: int) -> str:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).version == 6:
            return f"[{address}]:{port}"
    return f"{address}:{port}"
