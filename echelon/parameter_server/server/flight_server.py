"""A server's port: passes messages of many clients to one handler, and the answers back, over Arrow Flight.

A client has one ordered stream (``do_exchange``); each stream has its own thread, so that a slow or waiting client does
not delay other clients. Small requests outside a stream are actions. Clients are authenticated before any message is
read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from echelon.base.endpoints import split_endpoint
from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.security import OPEN, Security
from echelon.parameter_server.protocol.arrow_wire import SCHEMA, from_batch, to_batch
from echelon.parameter_server.protocol.connection import STREAM, one_line, quiet_grpc
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.port_check import check_port

Handler = Callable[[WireMessage, Callable[[], bool]], WireMessage]

#: Requests outside a stream; the handler answers them, except ``ready``, which the port answers itself.
ACTIONS = {"beat": "heartbeat of a worker", "stats": "counters of the server", "ready": "check that the port is open"}
MAX_STREAMS, MAX_ACTION = 1024, 2**16

log = logging.getLogger("echelon.parameter_server")


class FlightServer:
    """The port of a server, which listens from construction on. ``handler`` is called from one thread per stream."""

    def __init__(
        self, endpoint: str, handler: Handler, security: Security = OPEN, *, max_streams: int = MAX_STREAMS
    ) -> None:
        host, port = split_endpoint(endpoint)
        security.check_bind(host)
        check_port(endpoint)
        quiet_grpc()
        middleware = {"admission": _Admission(security)} if security.token is not None else None
        try:
            self._port = _Port(
                security.server_location(host, port),
                middleware=middleware,
                **security.server_options(),
            )
        except (pa.ArrowException, OSError) as error:
            why = "; look at its certificate and key" if security.certificate else "; use a free port of this host"
            raise UsageError(f"cannot listen on {endpoint} ({one_line(error)}){why}") from None
        self._port.frames = _Streams(handler, max_streams)
        self.endpoint = f"{host}:{self._port.port}"

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return self._port.frames.open

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of received requests, and of sent answers."""
        return self._port.frames.bytes_in, self._port.frames.bytes_out

    def close(self, patience: float = 1.0) -> bool:
        """Stop listening; return False if clients still hold streams after ``patience`` seconds.

        Only clients can end their streams.
        """
        ended = threading.Thread(target=self._port.shutdown, daemon=True)
        ended.start()
        ended.join(patience)
        return not ended.is_alive()


class _Streams:
    """Passes requests from streams and actions to the handler; an exception in the handler becomes an answer, too."""

    def __init__(self, handler: Handler, most: int) -> None:
        self._handler, self._most = handler, most
        self._lock = threading.Lock()
        self.open = 0
        self.bytes_in = self.bytes_out = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        with self._lock:
            if self.open >= self._most:
                raise flight.FlightUnavailableError(f"this server has {self._most} streams open already")
            self.open += 1
        try:
            yield
        finally:
            with self._lock:
                self.open -= 1

    def answer(self, batch: Any, gone: Callable[[], bool]) -> Any:
        """Return the answer to a request; both are record batches."""
        try:
            return self._counted(batch, to_batch(self._handler(from_batch(batch), gone)))
        except EchelonError as error:
            return to_batch(WireMessage({"error": one_line(error), "lost": isinstance(error, PeerLost)}))
        except Exception as error:
            log.exception("a request failed")
            return to_batch(WireMessage({"error": f"the server failed with {type(error).__name__}: {one_line(error)}"}))

    def _counted(self, question: Any, answer: Any) -> Any:
        with self._lock:
            self.bytes_in += question.nbytes
            self.bytes_out += answer.nbytes
        return answer

    def act(self, name: str, body: bytes, gone: Callable[[], bool]) -> bytes:
        """Return the encoded head that answers an action."""
        if len(body) > MAX_ACTION:
            raise flight.FlightServerError(f"an action of {len(body)} bytes is over the limit of {MAX_ACTION}")
        if name == "ready":
            return b'{"ok":true}'
        try:
            head = json.loads(body or b"{}")
            if not isinstance(head, dict):
                raise ValueError("it is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise flight.FlightServerError(f"an action cannot be read: {one_line(error)}") from None
        batch = self.answer(to_batch(WireMessage({**head, "op": name})), gone)
        return json.dumps(from_batch(batch).head).encode()


class _Port(flight.FlightServerBase):  # type: ignore[misc]
    """The methods that Flight calls. An exception in them ends the call with a Flight error; the server continues."""

    frames: _Streams

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        if descriptor.path != [STREAM]:
            raise flight.FlightServerError(f"no stream of this name; there is only {STREAM.decode()!r}")
        with self.frames.place():
            if not reader.schema.equals(SCHEMA):
                raise flight.FlightServerError("the stream's schema is not that of messages; use the same version")
            writer.begin(SCHEMA)
            for batch in _batches(reader):
                answer = self.frames.answer(batch, context.is_cancelled)
                del batch  # a client that reads its answer slowly must not hold the request's memory as well
                try:
                    writer.write_batch(answer)
                except (pa.ArrowException, OSError):
                    return  # the client is gone; it resends the request if it is still alive

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        if action.type not in ACTIONS:
            raise flight.FlightServerError(f"no action of this name; known: {', '.join(ACTIONS)}")
        if action.body.size > MAX_ACTION:
            raise flight.FlightServerError(f"an action of {action.body.size} bytes is over the limit of {MAX_ACTION}")
        return iter([self.frames.act(action.type, action.body.to_pybytes(), context.is_cancelled)])

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return list(ACTIONS.items())


def _batches(reader: Any) -> Iterator[Any]:
    while True:
        try:
            yield reader.read_chunk().data
        except StopIteration:
            return


class _Admission(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects calls without the token before their content is read. Rejections are logged at most every 10 s."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._refused, self._logged_at = 0, 0.0

    def start_call(self, info: Any, headers: Any) -> None:
        if self._security.admits(headers):
            return
        self._refused += 1
        if time.monotonic() - self._logged_at > 10:
            self._logged_at = time.monotonic()
            log.warning("calls without the right token so far: %d", self._refused)
        raise flight.FlightUnauthenticatedError("the token is not this server's")
