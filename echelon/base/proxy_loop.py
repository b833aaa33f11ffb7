"""Connections that a launcher forwards: one thread with an asyncio loop carries all of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from echelon.base.job_secret import PATIENCE, HandshakeError, Proof
from echelon.base.network import stay_alert

#: Bytes of a connection that are buffered before it is authenticated: enough for the proof.
KEPT = 1024

T = TypeVar("T")


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    carrier = asyncio.new_event_loop()
    threading.Thread(target=carrier.run_forever, name="echelon-pipes", daemon=True).start()
    return carrier


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the thread of the proxy loop, and return its result to a caller in another thread."""
    return asyncio.run_coroutine_threadsafe(work, loop()).result()


class ProxyConnection(asyncio.Protocol):
    """One connection. Received bytes are buffered for ``converse`` until ``forward_to`` connects it to another one."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._news = asyncio.Event()
        self._ended = False
        self._sink: ProxyConnection | None = None
        self.lost = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    @classmethod
    async def accepted(cls, caller: socket.socket, tls: ssl.SSLContext | None = None) -> ProxyConnection:
        _, end = await asyncio.get_running_loop().connect_accepted_socket(
            cls, caller, ssl=tls, ssl_handshake_timeout=PATIENCE if tls else None
        )
        return end

    @classmethod
    async def called(cls, address: str, port: int, tls: ssl.SSLContext | None = None) -> ProxyConnection:
        _, end = await asyncio.get_running_loop().create_connection(
            cls, address, port, ssl=tls, server_hostname=address if tls else None
        )
        stay_alert(end.transport.get_extra_info("socket"))
        return end

    async def converse(self, proof: Proof) -> None:
        """Run the handshake. Raises ``HandshakeError`` unless the other end proves the secret in time."""
        try:
            async with asyncio.timeout(PATIENCE):
                say, wanted = next(proof)
                with contextlib.suppress(StopIteration):
                    while True:
                        self.transport.write(say)
                        say, wanted = proof.send(await self._receive(wanted))
        except TimeoutError:
            raise HandshakeError(f"it did not answer within {PATIENCE:g} s") from None

    async def _receive(self, count: int) -> bytes:
        while len(self._kept) < count:
            if self._ended:
                raise HandshakeError("it closed the connection")
            self._news.clear()
            await self._news.wait()
        result = bytes(self._kept[:count])
        del self._kept[:count]
        return result

    def forward_to(self, sink: ProxyConnection) -> None:
        self._sink = sink
        sink.transport.write(bytes(self._kept))
        self._kept.clear()
        self.transport.resume_reading()
        if self._ended:
            sink.send_eof()

    def send_eof(self) -> None:
        """Tell this end that the other connection has no more bytes to send."""
        if self._ended or not self.transport.can_write_eof():  # TLS cannot close one direction only
            self.transport.close()
        else:
            self.transport.write_eof()

    # Callbacks of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.transport.write(data)
            return
        self._kept += data
        if len(self._kept) > KEPT:
            self.transport.pause_reading()
        self._news.set()

    def eof_received(self) -> bool:
        self._ended = True
        self._news.set()
        if self._sink is not None:
            self._sink.send_eof()
        return self.transport.can_write_eof()  # keep the transport open if this end may still send

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._news.set()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        if self._sink is not None:
            self._sink.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._sink is not None:
            self._sink.transport.resume_reading()


async def join(one: ProxyConnection, other: ProxyConnection) -> None:
    """Forward bytes both ways until both connections have ended, or one is lost."""
    one.forward_to(other)
    other.forward_to(one)
    try:
        await asyncio.wait([one.lost, other.lost], return_when=asyncio.FIRST_COMPLETED)
    finally:  # bytes sent before the end are still delivered
        one.transport.close()
        other.transport.close()


Receive = Callable[[socket.socket, Callable[[], None]], Coroutine[Any, Any, None]]


class ProxyListener:
    """A listening socket that runs ``receive(connection, know)`` for every connection; after a proof it calls ``know``.

    ``know`` is an argument since the first caller can be there before the constructor has returned.

    at_most:  limit of unauthenticated connections, those without a call of ``know``; beyond it the oldest is dropped,
              because a peer that knows the secret would have proven it long before
    """

    def __init__(self, listener: socket.socket, receive: Receive, at_most: int) -> None:
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self.callers = 0
        self._listener, self._receive, self._at_most = listener, receive, at_most
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._busy: set[asyncio.Task[Any]] = set()
        loop().call_soon_threadsafe(self._open)

    def know(self) -> None:
        """Mark the current connection as authenticated."""
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)

    @property
    def idle(self) -> bool:
        """True if it has had connections and has none now."""
        return self.callers > 0 and not self._busy

    def close(self) -> None:
        """Stop listening; any thread may call it. Open connections stay open."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop().call_soon_threadsafe(self._shut)

    def _open(self) -> None:
        if self._listener.fileno() >= 0:
            loop().add_reader(self._listener, self._answer)

    def _shut(self) -> None:
        loop().remove_reader(self._listener)
        self._listener.close()

    def _answer(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no file descriptors left: try again later
            loop().remove_reader(self._listener)
            loop().call_later(0.1, self._open)
            return
        self._let_in(caller)

    def _let_in(self, caller: socket.socket) -> None:
        self.callers += 1
        task = loop().create_task(self._tend(caller))
        self._unproven[task] = None
        self._busy.add(task)
        task.add_done_callback(self._let_out)
        if len(self._unproven) > self._at_most:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.cancel()

    async def _tend(self, caller: socket.socket) -> None:
        try:
            await self._receive(caller, self.know)
        except (OSError, HandshakeError):  # an error of one connection must not affect the others
            caller.close()
        except BaseException:
            caller.close()
            raise

    def _let_out(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._busy.discard(task)


def is_ours(caller: socket.socket) -> bool:
    """Return True if a process of the same user holds the other end of a loopback connection.

    This is known for open connections only: a connection that was closed at once has no owner.
    """
    tables = [table for table in ("/proc/net/tcp", "/proc/net/tcp6") if os.access(table, os.R_OK)]
    try:
        theirs, ours = (f"0100007F:{end[1]:04X}" for end in (caller.getpeername(), caller.getsockname()))
    except OSError:
        return False
    for table in tables:
        with open(table) as lines:
            for line in lines:
                near, far, state, _, _, _, owner = line.split()[1:8]
                if near.endswith(theirs) and far.endswith(ours) and state == "01":
                    return int(owner) == os.getuid()
    return not tables  # without these tables, as on other systems, the owner cannot be checked
