"""``AcceptLoop``: a caller that waits before the loop exists is served, and no stranger pushes out a known caller."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from echelon.base.accept_loop import AcceptLoop


def echo(caller: socket.socket, know: Callable[[], None]) -> None:
    """Prove a caller by its first byte, then send back all it says."""
    while data := caller.recv(1):
        know()
        caller.sendall(data)


def is_cut(caller: socket.socket) -> bool:
    caller.settimeout(10)
    return caller.recv(1) == b""


def test_strangers_push_out_strangers_only() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with contextlib.ExitStack() as sockets:
        known = sockets.enter_context(socket.create_connection(address))
        known.sendall(b"a")  # it waits in the backlog, so it may be served before the loop's constructor has returned
        loop = AcceptLoop(listener, echo, "test", unproven=1)
        assert known.recv(1) == b"a"
        first, second = (sockets.enter_context(socket.create_connection(address)) for _ in range(2))
        assert is_cut(first)
        for caller in (known, second):
            caller.sendall(b"b")
            assert caller.recv(1) == b"b"
        loop.close()
        loop.cut()
        assert is_cut(known)
        assert is_cut(second)
