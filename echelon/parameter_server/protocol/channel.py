"""A client's ordered channel to one server: requests and answers keep their order, and lost connections are reopened.

When the connection breaks, the channel connects again, sends ``hello`` and resends every request without an answer; the
server knows from their sequence numbers which of them it has already handled. A caller only sees a longer delay, until
the server has been away for ``timeout`` seconds: then all pending requests fail with one line that names the server.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from echelon.base.environment import PS_JOIN_TIMEOUT
from echelon.base.errors import EchelonError, PeerLost
from echelon.base.heartbeat_monitor import HeartbeatMonitor
from echelon.base.job_secret import HandshakeError
from echelon.base.security import OPEN, Security
from echelon.parameter_server.protocol.connection import (
    ServerConnection,
    ServerConnectionLost,
    explain,
    explain_foreign_server,
    explain_missing_tls,
    one_line,
    refusal,
)
from echelon.parameter_server.protocol.message import WireMessage, WireMessageError
from echelon.parameter_server.protocol.message_wire import PackedMessage

Call = Callable[[WireMessage], WireMessage]
Hello = Callable[[Call], None]

#: Seconds between attempts to connect: the first delay and the longest.
SOONEST, LATEST = 0.05, 0.4
#: Seconds that a server may take to answer that its port is open.
PROBE = 2.0
#: Largest number of requests without an answer; beyond it ``send`` waits.
IN_FLIGHT = 64
#: Requests whose answers do not show that the server holds any state of the job.
INTRODUCTIONS = ("hello", "open")


@dataclass
class _PendingRequest:
    """A request that has no answer yet."""

    message: PackedMessage
    op: str = ""
    answer: Future[WireMessage] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.answer.set_running_or_notify_cancel()  # a sent request cannot be cancelled

    def resolve(self, frame: WireMessage) -> None:
        line = frame.head.get("error")
        if line is None:
            self.answer.set_result(frame)
        else:
            self.answer.set_exception((PeerLost if frame.head.get("lost") else EchelonError)(str(line)))

    def shows_state(self, frame: WireMessage) -> bool:
        """Return True if this answer shows that the server holds values of the job."""
        return self.op not in INTRODUCTIONS or bool(frame.head.get("begun"))


class ServerChannel:
    """An ordered channel to one server. ``send`` may be called from several threads; requests go out in call order.

    hello:      called after each reconnect, with a function that sends one request, before pending requests are resent
    timeout:    seconds that the server may be away while a request is pending; default 60
    join:       seconds that the server may take to start; default ``timeout``
    name:       name of the server in error messages
    in_flight:  largest number of requests without an answer; default 64

    The arrays of a message must stay unchanged until it is answered, because it may have to be sent again.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        hello: Hello | None = None,
        security: Security = OPEN,
        timeout: float = 60.0,
        join: float | None = None,
        name: str = "the server",
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.endpoint, self.name, self.timeout = endpoint, name, timeout
        self.reconnects = 0
        self.holds_state = False  #: the server has shown that it holds values of the job
        self.trouble = ""  #: why the last attempt to connect failed
        self._join = join
        self._hello, self._security = hello, security
        self._room = threading.Semaphore(in_flight)
        self._writing = threading.Lock()  # order of requests; held while one is written
        self._state = threading.Condition()  # the fields below; never held while anything is written or read
        self._waiting: deque[_PendingRequest] = deque()
        self._connection: ServerConnection | None = None
        self._live = False  # True: ``send`` writes requests at once; False: the thread sends the pending ones
        self._over: EchelonError | None = None
        self._away_since: float | None = None
        self._acquainted = False  # the server has answered once, so after a reconnect it must know this worker
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # ---- for callers ----

    def send(self, frame: WireMessage) -> Future[WireMessage]:
        """Send a request and return a future of its answer. Waits only if too many requests are in flight."""
        waiting = _PendingRequest(PackedMessage.of(frame), str(frame.head.get("op")))
        self._room.acquire()
        with self._writing:
            with self._state:
                if self._over is not None:
                    self._room.release()
                    raise self._over
                self._waiting.append(waiting)
                live = self._connection if self._live else None
                self._start()
                self._state.notify_all()
            if live is not None:
                try:
                    live.write(waiting.message)
                except OSError:
                    live.cut()  # the thread notices it and reconnects
        return waiting.answer

    def call(self, frame: WireMessage) -> WireMessage:
        """Send a request and wait for its answer; the server's error is raised here."""
        return self.send(frame).result()

    def waits_for(self) -> int:
        """Return the number of requests without an answer."""
        return len(self._waiting)

    def break_off(self) -> None:
        """Abandon the current connection, because it fell silent without breaking."""
        with self._state:
            connection = self._connection
        if connection is not None:
            connection.cut()

    def give_up(self, error: EchelonError) -> None:
        """Fail all pending and all later requests with ``error``."""
        self._end(error)
        self.break_off()

    def close(self) -> None:
        """Close the channel; pending requests fail."""
        if self._process != os.getpid():  # in a forked child: the thread and the connection belong to the parent
            return
        self._end(EchelonError(f"the link to {self.name} at {self.endpoint} is closed"))
        self.break_off()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- the thread: connects, reads answers, reconnects ----

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"link to {self.endpoint}", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _run(self) -> None:
        try:
            while self._needed():
                with contextlib.suppress(ServerConnectionLost):
                    self._connect()
                    self._catch_up()
                    self._read_on()
                self._drop()
        except EchelonError as error:
            self._end(error)
        except Exception as error:
            self._end(EchelonError(f"the link to {self.name} failed with {type(error).__name__}: {one_line(error)}"))
        finally:
            self._drop()
            atexit.unregister(self.close)

    def _needed(self) -> bool:
        """Wait until there is something to send; return False if the channel is closed."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._over)
            return self._over is None

    def _connect(self) -> None:
        """Open a connection on which the server has answered. Raises ``PeerLost`` when the time is up."""
        pause = SOONEST
        if self._away_since is None:
            self._away_since = time.monotonic()
        while True:
            try:
                self._attempt()
                return
            except ServerConnectionLost as error:
                self._drop()
                self.trouble = str(error)
                left = self._away_since + self._patience - time.monotonic()
                if left <= 0:
                    raise self._lost(str(error)) from None
                with self._state:
                    if self._state.wait_for(lambda: self._over, min(pause, left)):
                        raise self._over or error from None
                pause = min(2 * pause, LATEST)

    def _attempt(self) -> None:
        with self._breaking():
            connection = ServerConnection(self.endpoint, self._security)
            with self._state:
                self._connection = connection
            connection.open(min(PROBE, self.timeout))
            connection.share_memory(min(PROBE, self.timeout))
        with self._state:  # close() may have run before there was a connection to cut; from here on it can cut this one
            if self._over is not None:
                raise self._over
        if self._acquainted:
            self.reconnects += 1
            if self._hello is not None:
                self._hello(self._ask)

    def _ask(self, frame: WireMessage) -> WireMessage:
        """Send one request on a fresh connection and return its answer."""
        waiting = _PendingRequest(PackedMessage.of(frame))
        waiting.resolve(self._exchange(waiting.message))
        return waiting.answer.result()

    def _exchange(self, message: PackedMessage) -> WireMessage:
        assert self._connection is not None
        with self._breaking():
            self._connection.write(message)
            return self._connection.read()

    def _catch_up(self) -> None:
        """Resend the pending requests one by one: all at once could fill both directions and deadlock both sides."""
        while True:
            with self._writing, self._state:
                if not self._waiting:
                    self._live = True
                    return
                first = self._waiting[0]
            self._answered(self._exchange(first.message))

    def _read_on(self) -> None:
        assert self._connection is not None
        while True:
            with self._breaking():
                frame = self._connection.read()
            self._answered(frame)

    def _answered(self, frame: WireMessage) -> None:
        with self._state:
            if not self._waiting:  # the channel was closed in the meantime
                return
            first = self._waiting.popleft()
        self._away_since, self._acquainted, self.trouble = None, True, ""
        self.holds_state = self.holds_state or first.shows_state(frame)
        self._room.release()
        first.resolve(frame)

    def _drop(self) -> None:
        """Drop the connection. No thread writes to it afterwards."""
        self.break_off()
        with self._writing, self._state:
            connection, self._connection, self._live = self._connection, None, False
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _breaking(self) -> Any:
        """Translate a connection's errors into ``ServerConnectionLost``, or ``EchelonError`` if no retry can help."""
        try:
            yield
        except (OSError, HandshakeError, WireMessageError) as error:
            with self._state:
                if self._over is not None:
                    raise self._over from None
            line = refusal(error, self._security)
            if line is None and not self._acquainted:
                line = explain_foreign_server(error) or explain_missing_tls(error, self.endpoint, self._security)
            if line is not None:
                raise EchelonError(f"{self.name} at {self.endpoint} {line}") from None
            raise ServerConnectionLost(explain(error)) from None

    def _end(self, error: EchelonError) -> None:
        """Close the channel and fail all pending and all later requests with ``error``."""
        with self._state:
            self._over = self._over or error
            left, self._waiting = self._waiting, deque()
            self._state.notify_all()
        for waiting in left:
            self._room.release()
            waiting.answer.set_exception(self._over)

    @property
    def _patience(self) -> float:
        return self.timeout if self._acquainted or self._join is None else self._join

    def _lost(self, why: str) -> PeerLost:
        if not self._acquainted and self._join is not None:
            return PeerLost(
                f"{self.name} at {self.endpoint} has not answered within {self._join:g} s ({why}); "
                f"start it, or give it more time by --join-timeout or {PS_JOIN_TIMEOUT}"
            )
        return PeerLost(
            f"{self.name} at {self.endpoint} has not answered for {self.timeout:g} s ({why}); "
            "start it again, or look into its log for why it ended"
        )


class HeartbeatSender:
    """Sends the heartbeats of this worker to every server.

    Heartbeats have their own connections, so that a slow answer does not delay them. If a server has stopped answering
    heartbeats, its channel is made to reconnect, because a host that vanished does not close its connections.

    every:  seconds between two heartbeats; default 2
    links:  channels to reconnect when their server falls silent
    hear:   callback that receives the server's endpoint and each answer
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        worker: int,
        security: Security = OPEN,
        *,
        every: float = 2.0,
        links: Sequence[ServerChannel] = (),
        hear: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._worker = worker
        self._security = security
        self._every = every
        self._hear = hear
        self._links = {link.endpoint: link for link in links}
        self._connections: dict[str, ServerConnection] = {}
        self._endpoints, self._heartbeats = tuple(endpoints), HeartbeatMonitor()
        self._stop, self._process = threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        if self._process != os.getpid():
            return
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.is_set():
            for endpoint in self._endpoints:
                self._beat(endpoint)
            self._stop.wait(self._every)
        for connection in self._connections.values():
            connection.close()

    def _beat(self, endpoint: str) -> None:
        try:
            seconds = min(self._every, PROBE)
            if endpoint not in self._connections:
                connection = ServerConnection(endpoint, self._security)
                connection.open(seconds)
                self._connections[endpoint] = connection
            answer = self._connections[endpoint].ask(WireMessage({"op": "beat", "worker": self._worker}), seconds)
            self._heartbeats.hear(endpoint)
            if self._hear is not None:
                self._hear(endpoint, answer.head)
        except (
            OSError,
            HandshakeError,
            ServerConnectionLost,
            EchelonError,
        ):  # the channel that uses the server reports the error
            if endpoint in self._connections:
                self._connections.pop(endpoint).close()
            self._suspect(endpoint)

    def _suspect(self, endpoint: str) -> None:
        link = self._links.get(endpoint)
        if link is not None and link.waits_for() and self._heartbeats.silence(endpoint) > 3 * self._every:
            self._heartbeats.hear(endpoint)
            link.break_off()
