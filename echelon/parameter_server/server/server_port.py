"""A server's port: passes messages of many clients to one handler, and the answers back.

Each connection has its own thread, so that a slow or waiting client does not delay other clients. A caller proves the
token before a byte of a message is read. Strangers hold a socket and a thread for at most ten seconds, and at most 256
of them at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from echelon.base import network, tls
from echelon.base.accept_loop import AcceptLoop
from echelon.base.endpoints import split_endpoint
from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.job_secret import PATIENCE, REFUSED, HandshakeError, calleds_proof
from echelon.base.poll_interval import PollInterval
from echelon.base.security import OPEN, Security
from echelon.parameter_server.protocol import message_wire
from echelon.parameter_server.protocol.byte_stream import ByteStream, TlsStream
from echelon.parameter_server.protocol.connection import one_line
from echelon.parameter_server.protocol.frame_memory import open_offered
from echelon.parameter_server.protocol.message import WireMessage, WireMessageError
from echelon.parameter_server.protocol.message_wire import PackedMessage, ReceivedMessage
from echelon.parameter_server.protocol.port_check import check_port

Handler = Callable[[WireMessage, Callable[[], bool]], WireMessage]

#: Limit of open connections of members: a worker has one, and one for its heartbeats.
MAX_STREAMS = 4096

log = logging.getLogger("echelon.parameter_server")


class ServerPort:
    """The port of a server, which listens from construction on. ``handler`` is called from one thread per stream.

    wait: seconds to wait for a port that is in use; default 0
    """

    def __init__(
        self,
        endpoint: str,
        handler: Handler,
        security: Security = OPEN,
        *,
        max_streams: int = MAX_STREAMS,
        wait: float = 0.0,
    ) -> None:
        host, port = split_endpoint(endpoint)
        security.check_bind(host)
        check_port(endpoint, wait)
        self._security, self._handler, self._most = security, handler, max_streams
        self._tls, self._channel = tls.server_tls_context(security), tls.own_certificate_fingerprint(security)
        network.raise_descriptor_limit()
        try:
            listener = network.listen(network.resolve(host.strip("[]"), "the endpoint"), port)
        except OSError as error:
            raise UsageError(f"cannot listen on {endpoint} ({one_line(error)}); use a free port of this host") from None
        self._lock = threading.Lock()
        self._refused, self._warning_interval = 0, PollInterval(10.0)
        self.streams = 0  #: number of open streams
        self._in = self._out = 0
        self.endpoint = f"{host}:{listener.getsockname()[1]}"
        self._loop = AcceptLoop(listener, self._serve, "echelon-server")

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of received requests, and of sent answers."""
        return self._in, self._out

    def close(self, patience: float = 1.0) -> bool:
        """Stop listening, then cut the streams that clients still hold after ``patience`` seconds.

        The result is False if there were such streams.
        """
        self._loop.close()
        deadline = time.monotonic() + patience
        while self.streams and time.monotonic() < deadline:
            time.sleep(0.002)
        held = bool(self.streams)
        self._loop.cut()
        return not held

    def _serve(self, caller: socket.socket, know: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            stream = self._admitted(caller)
            if stream is None:
                return
            know()
            with self._place() as has_room:
                line = {"ok": True} if has_room else {"error": f"this server has {self._most} streams open already"}
                message_wire.send(stream, PackedMessage.of(WireMessage(line)))
                stream.limit(None)
                if has_room:
                    self._answer_all(stream)
            stream.say_and_close()

    def _admitted(self, caller: socket.socket) -> ByteStream | None:
        """Return the stream of a caller that has proven the token; None for a stranger."""
        stream = ByteStream(caller) if self._tls is None else TlsStream(caller, self._tls)
        stream.limit(PATIENCE)
        try:
            if isinstance(stream, TlsStream):
                stream.handshake()
            stream.converse(calleds_proof(self._security.proof_key, self._channel))
            return stream
        except HandshakeError as stranger:
            self._note_refusal(stranger.knows_our_language)
            if stranger.heard and not stranger.knows_our_language:
                stream.send([REFUSED])  # a client that begins TLS learns that this is none
        except ssl.SSLError:
            pass
        stream.say_and_close()
        return None

    def _note_refusal(self, has_wrong_token: bool) -> None:
        """Count callers with a wrong token; they are logged at most every 10 s."""
        with self._lock:
            self._refused += has_wrong_token
            if has_wrong_token and self._warning_interval.due():
                log.warning("calls without the right token so far: %d", self._refused)

    @contextlib.contextmanager
    def _place(self) -> Iterator[bool]:
        """Count a stream inside the context, if there is room."""
        with self._lock:
            has_room = self.streams < self._most
            self.streams += has_room
        try:
            yield has_room
        finally:
            with self._lock:
                self.streams -= has_room

    def _answer_all(self, stream: ByteStream) -> None:
        while True:
            try:
                request = message_wire.receive(stream)
            except WireMessageError as error:  # what follows cannot be told apart any more
                message_wire.send(stream, _failure(str(error)))
                return
            if _shares_memory(stream, request):
                continue
            size = request.nbytes
            answer = answer_request(self._handler, request, stream.has_ended)
            del request  # a client that reads its answer slowly must not hold the request's memory as well
            with self._lock:
                self._in += size
                self._out += answer.nbytes
            message_wire.send(stream, answer)


def _shares_memory(stream: ByteStream, request: ReceivedMessage) -> bool:
    """Answer an offer of memory, and use it from then on if it is sound; return False for any other request."""
    if b'"share_memory"' not in request.head:
        return False
    try:
        head = request.unpacked().head
    except WireMessageError:
        return False
    if head.get("op") != "share_memory":
        return False
    memory = open_offered(head) if stream.can_share_memory and stream.memory is None else None
    message_wire.send(stream, PackedMessage.of(WireMessage({"ok": True, "shared": memory is not None})))
    stream.memory = stream.memory or memory
    return True


def answer_request(handler: Handler, request: ReceivedMessage, has_hung_up: Callable[[], bool]) -> PackedMessage:
    """Return the answer to a request; an exception in the handler becomes an answer, too."""
    try:
        return PackedMessage.of(handler(request.unpacked(), has_hung_up))
    except EchelonError as error:
        return _failure(one_line(error), lost=isinstance(error, PeerLost))
    except Exception as error:
        log.exception("a request failed")
        return _failure(f"the server failed with {type(error).__name__}: {one_line(error)}")


def _failure(line: str, **more: Any) -> PackedMessage:
    return PackedMessage.of(WireMessage({"error": line, **more}))
