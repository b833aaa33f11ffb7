"""The protocol of snapshot servers: a JSON head, then bytes that the head announces."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from echelon.base.job_secret import HandshakeError, prove
from echelon.base.json_head import PREFIX, MalformedHeadError, parse_object, read_length, write_head

#: The longest message in bytes; the table of a hundred thousand tensors is a third of it.
LONGEST = 32 << 20
#: Seconds to connect to a host, and for the rest of a message that has begun.
REACH, REST = 10.0, 60.0


class SnapshotProtocolError(Exception):
    """Received bytes are not a message of this protocol."""


class SnapshotRefusedError(Exception):
    """The server understood a request and refused it."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    head = write_head(message)
    if len(head) - PREFIX > LONGEST:
        raise SnapshotRefusedError(f"a message of {len(head)} bytes is too long")
    connection.sendall(head)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; ``None`` if the other side closed the connection between two messages."""
    first = connection.recv(PREFIX)
    if not first:
        return None
    before = connection.gettimeout()
    connection.settimeout(REST)
    try:
        length = read_length(first + _exactly(connection, PREFIX - len(first)), LONGEST)
        message = parse_object(_exactly(connection, length))
    except MalformedHeadError as error:
        raise SnapshotProtocolError(f"a message that is {error}") from None
    connection.settimeout(before)
    return message


def fill(connection: socket.socket, into: memoryview) -> None:
    """Receive exactly ``len(into)`` bytes into ``into``."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            raise SnapshotProtocolError("an incomplete message")
        at += count


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes into a growing buffer, so that an announced length alone allocates no memory."""
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(min(count - len(found), 1 << 16))
        if not piece:
            raise SnapshotProtocolError("an incomplete message")
        found += piece
    return bytes(found)


class SnapshotClient:
    """A connection to a snapshot server. Its methods raise ``OSError`` or ``SnapshotRefusedError``."""

    def __init__(self, address: str, key: bytes | None, timeout: float = REST) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self.connection = socket.create_connection((host.strip("[]"), int(port)), timeout=REACH)
        try:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if key is not None:
                prove(self.connection, key)
        except HandshakeError as error:
            self.close()
            raise SnapshotRefusedError(f"the snapshot server at {address} refused the connection: {error}") from None
        except OSError:
            self.close()
            raise
        self.connection.settimeout(timeout)

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        send(self.connection, {"op": op, **fields})
        return self.answer()

    def answer(self) -> dict[str, Any]:
        try:
            reply = receive(self.connection)
        except SnapshotProtocolError as error:
            raise ConnectionResetError(f"the snapshot server at {self.address} sent {error}") from None
        if reply is None:
            raise ConnectionResetError(f"the snapshot server at {self.address} closed the connection")
        if "error" in reply:
            raise SnapshotRefusedError(str(reply["error"]))
        return reply

    def fill(self, into: memoryview) -> None:
        try:
            fill(self.connection, into)
        except SnapshotProtocolError as error:
            raise ConnectionResetError(f"the snapshot server at {self.address} sent {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()
