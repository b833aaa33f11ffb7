"""A connection between two processes as a stream of bytes: plain, or encrypted by TLS.

One thread may send while another receives. Arrays are sent from their memory and received into it, without a copy.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from echelon.base import network
from echelon.base.accept_loop import cut
from echelon.base.job_secret import HandshakeError, Proof
from echelon.parameter_server.protocol.frame_memory import FrameMemory

#: Bytes that are encrypted at once, and that are read at once to be decrypted.
_PIECE = 1 << 18
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class StreamEndedError(ConnectionError):
    """The other end has closed the connection."""


class ByteStream:
    """A plain connection.

    memory: memory that both ends share; None without any
    """

    can_share_memory = True

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.memory: FrameMemory | None = None
        self._deadline: float | None = None
        network.stay_alert(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, seconds: float | None) -> None:
        """Set the time by which everything must be sent and received from now on; None: any time.

        After it, methods raise ``TimeoutError``.
        """
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def send(self, buffers: Sequence[Any]) -> None:
        """Send all bytes of some buffers in order."""
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        while left:
            self._hurry()
            sent = self._socket.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def receive_into(self, buffers: Sequence[Any]) -> None:
        """Fill buffers in order. Raises ``StreamEndedError`` if the other end hangs up before."""
        left = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        while left:
            self._hurry()
            got = self._receive_some(left)
            if not got:
                raise StreamEndedError("the connection was closed")
            while left and got >= left[0].nbytes:
                got -= left.pop(0).nbytes
            if got:
                left[0] = left[0][got:]

    def converse(self, proof: Proof) -> None:
        """Run one side of the proof of the secret. Raises ``HandshakeError`` unless the other side knows it."""
        say, wanted = next(proof)
        with contextlib.suppress(StopIteration):
            while True:
                self.send([say])
                say, wanted = proof.send(self._receive(wanted))

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the other end has shown; None without TLS."""
        return None

    def is_on_one_host(self) -> bool:
        """Return True if both ends have the same address."""
        with contextlib.suppress(OSError):
            return bool(self._socket.getpeername()[0] == self._socket.getsockname()[0])
        return False

    def has_ended(self) -> bool:
        """Return True if the other end has hung up, even if bytes from before are not read yet."""
        poll = select.poll()
        poll.register(self._socket, _HANGUP)
        return bool(poll.poll(0))

    def cut(self) -> None:
        """Make blocked and later calls fail. Any thread may call it."""
        cut(self._socket)

    def close(self) -> None:
        self._socket.close()

    def say_and_close(self, seconds: float = 1.0) -> None:
        """Let the other end read what was sent, and hang up first: closing with unread bytes would discard it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            self._socket.settimeout(seconds)
            for _ in range(16):
                if not self._socket.recv(_PIECE):
                    break
        self._socket.close()

    def _receive(self, count: int) -> bytes:
        found = bytearray(count)
        view, got = memoryview(found), 0
        while got < count:
            self._hurry()
            more = self._receive_some([view[got:]])
            if not more:
                raise HandshakeError("it closed the connection", heard=bytes(view[:got]))
            got += more
        return bytes(found)

    def _receive_some(self, views: list[memoryview]) -> int:
        return self._socket.recvmsg_into(views)[0]

    def _hurry(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)


class TlsStream(ByteStream):
    """A connection encrypted by TLS, which begins with ``handshake``.

    OpenSSL does not allow two threads in one connection. So bytes are encrypted and decrypted in memory, under a lock,
    and sent and received without it.
    """

    can_share_memory = False  # what was to be encrypted goes through the connection

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        super().__init__(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = host if context.check_hostname or host is None else None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=name)
        self._lock, self._order = threading.Lock(), threading.Lock()

    def handshake(self) -> None:
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush()
                    self._feed()
        finally:
            with contextlib.suppress(OSError):
                self._flush()  # an error is told to the other end, too

    def send(self, buffers: Sequence[Any]) -> None:
        with self._order:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                for begin in range(0, view.nbytes, _PIECE):
                    with self._lock:
                        self._tls.write(view[begin : begin + _PIECE])
                        sealed = self._outgoing.read()
                    self._hurry()
                    self._socket.sendall(sealed)

    @property
    def certificate(self) -> bytes | None:
        return self._tls.getpeercert(binary_form=True)

    def _receive_some(self, views: list[memoryview]) -> int:
        while True:
            try:
                with self._lock:
                    return cast(int, self._tls.read(views[0].nbytes, views[0]))
            except ssl.SSLWantReadError:
                self._feed()
            except ssl.SSLEOFError:
                return 0

    def _feed(self) -> None:
        self._hurry()
        sealed = self._socket.recv(_PIECE)
        with self._lock:
            if sealed:
                self._incoming.write(sealed)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        with self._order, self._lock:
            self._socket.sendall(self._outgoing.read())
