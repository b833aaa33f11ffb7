"""A client's ordered link to one server: requests go out in order, answers come back in order, breaks are mended.

When the connection breaks, the link connects again, says ``hello`` and sends once more whatever was not answered; the
server knows by their numbers which of these it has already done. A caller notices only that it took longer, until the
server has been away for ``timeout`` seconds: then everything that waits fails with one line that names it.
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

import pyarrow as pa

from echelon.base.environment import PS_JOIN_TIMEOUT
from echelon.base.errors import EchelonError, PeerLost
from echelon.base.security import OPEN, Security
from echelon.parameter_server.protocol.arrow_wire import to_batch
from echelon.parameter_server.protocol.connection import (
    FlightConnection,
    ServerConnectionLost,
    explain,
    explain_foreign_server,
    explain_tls_rejection,
    one_line,
    refusal,
)
from echelon.parameter_server.protocol.message import WireMessage

Call = Callable[[WireMessage], WireMessage]
Hello = Callable[[Call], None]

#: Seconds between attempts to connect: the first and the longest.
SOONEST, LATEST = 0.05, 0.4
#: Seconds that a server may take to say that its port is open.
PROBE = 2.0
#: Requests without an answer before ``send`` waits.
IN_FLIGHT = 64
#: Requests whose answers do not show that the server holds anything of the job.
INTRODUCTIONS = ("hello", "open")


@dataclass
class _PendingRequest:
    """A request that has no answer yet."""

    batch: Any
    op: str = ""
    answer: Future[WireMessage] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.answer.set_running_or_notify_cancel()  # what was sent cannot be taken back

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
    """The way to one server. ``send`` may be called from several threads; their order is that of the calls.

    hello:    called after the connection was made anew, with a function that asks on it, before anything is sent again
    timeout:  seconds that the server may be away while something waits for it
    join:     seconds that it may take to come at all; as ``timeout`` by default
    name:     what messages call the server

    The arrays of a frame must stay unchanged until it is answered: it may have to be sent again.
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
        self._connection: FlightConnection | None = None
        self._live = False  # requests go out as they come; else the thread sends those that wait
        self._over: EchelonError | None = None
        self._away_since: float | None = None
        self._acquainted = False  # the server has answered something: one that comes back must know us
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # ---- for callers ----

    def send(self, frame: WireMessage) -> Future[WireMessage]:
        """Send a request; its answer, later. Waits only if too many are under way."""
        waiting = _PendingRequest(to_batch(frame), str(frame.head.get("op")))
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
                    live.write(waiting.batch)
                except (pa.ArrowException, OSError):
                    live.cut()  # the thread sees it, and mends it
        return waiting.answer

    def call(self, frame: WireMessage) -> WireMessage:
        """Send a request and wait for its answer; the server's error is raised here."""
        return self.send(frame).result()

    def waits_for(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    def break_off(self) -> None:
        """Give the present connection up, for one that has gone silent without breaking."""
        with self._state:
            connection = self._connection
        if connection is not None:
            connection.cut()

    def give_up(self, error: EchelonError) -> None:
        """Let everything that waits, and everything that comes, fail with ``error``."""
        self._end(error)
        self.break_off()

    def close(self) -> None:
        """End the link; what still waits fails."""
        if self._process != os.getpid():  # a child's copy: the thread and the connection are the parent's
            return
        self._end(EchelonError(f"the link to {self.name} at {self.endpoint} is closed"))
        self.break_off()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- the thread: connects, reads answers, mends ----

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"link to {self.endpoint}", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread that is inside gRPC when Python ends would abort the process

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
        """Wait until there is something to send; False when the link is over."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._over)
            return self._over is None

    def _connect(self) -> None:
        """Have a connection on which the server has answered, before the time is up."""
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
            connection = FlightConnection(self.endpoint, self._security)
            with self._state:
                self._connection = connection
            connection.act("ready", {}, min(PROBE, self.timeout))
            connection.open()
        with self._state:  # from here on, close() can cut what the thread waits for; before, it had nothing to cut
            if self._over is not None:
                raise self._over
        if self._acquainted:
            self.reconnects += 1
            if self._hello is not None:
                self._hello(self._ask)

    def _ask(self, frame: WireMessage) -> WireMessage:
        """One question and its answer on a fresh connection."""
        waiting = _PendingRequest(to_batch(frame))
        waiting.resolve(self._exchange(waiting.batch))
        return waiting.answer.result()

    def _exchange(self, batch: Any) -> WireMessage:
        assert self._connection is not None
        with self._breaking():
            self._connection.write(batch)
            return self._connection.read()

    def _catch_up(self) -> None:
        """Send what waits, one after the other: all at once could fill both directions, and both sides would wait."""
        while True:
            with self._writing, self._state:
                if not self._waiting:
                    self._live = True
                    return
                first = self._waiting[0]
            self._answered(self._exchange(first.batch))

    def _read_on(self) -> None:
        assert self._connection is not None
        while True:
            with self._breaking():
                frame = self._connection.read()
            self._answered(frame)

    def _answered(self, frame: WireMessage) -> None:
        with self._state:
            if not self._waiting:  # closed meanwhile
                return
            first = self._waiting.popleft()
        self._away_since, self._acquainted, self.trouble = None, True, ""
        self.holds_state = self.holds_state or first.shows_state(frame)
        self._room.release()
        first.resolve(frame)

    def _drop(self) -> None:
        """Let go of the connection. Nobody writes to it afterwards."""
        self.break_off()
        with self._writing, self._state:
            connection, self._connection, self._live = self._connection, None, False
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _breaking(self) -> Any:
        """Turn what gRPC raises into what it means: a break, or a refusal that no second try will change."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            with self._state:
                if self._over is not None:
                    raise self._over from None
            line = refusal(error, self._security)
            if line is None and not self._acquainted:
                line = explain_tls_rejection(error, self.endpoint, self._security) or explain_foreign_server(error)
            if line is not None:
                raise EchelonError(f"{self.name} at {self.endpoint} {line}") from None
            raise ServerConnectionLost(explain(error, self.endpoint)) from None

    def _end(self, error: EchelonError) -> None:
        """No more answers: everything that waits, and everything that comes, gets ``error``."""
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
                f"{self.name} at {self.endpoint} has not come within {self._join:g} s ({why}); "
                f"start it, or give it more time by --join-timeout or {PS_JOIN_TIMEOUT}"
            )
        return PeerLost(
            f"{self.name} at {self.endpoint} has not answered for {self.timeout:g} s ({why}); "
            "start it again, or look into its log for why it ended"
        )


class HeartbeatSender:
    """Tells every server, now and then, that this worker lives.

    Its connections are its own, so that no answer that takes long holds a beat up. A link whose server has stopped
    answering beats is broken off: a host that vanished never says so.

    hear:  is given each answer and the endpoint that it came from
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
        self._worker, self._security, self._every, self._hear = worker, security, every, hear
        self._links = {link.endpoint: link for link in links}
        self._connections: dict[str, FlightConnection] = {}
        self._heard = dict.fromkeys(endpoints, time.monotonic())
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
            for endpoint in self._heard:
                self._beat(endpoint)
            self._stop.wait(self._every)
        for connection in self._connections.values():
            connection.close()

    def _beat(self, endpoint: str) -> None:
        try:
            if endpoint not in self._connections:
                self._connections[endpoint] = FlightConnection(endpoint, self._security)
            answer = self._connections[endpoint].act("beat", {"worker": self._worker}, min(self._every, PROBE))
            self._heard[endpoint] = time.monotonic()
            if self._hear is not None:
                self._hear(endpoint, answer)
        except (pa.ArrowException, OSError, EchelonError):  # whoever needs the server says what is wrong with it
            if endpoint in self._connections:
                self._connections.pop(endpoint).close()
            self._suspect(endpoint)

    def _suspect(self, endpoint: str) -> None:
        link = self._links.get(endpoint)
        if link is not None and link.waits_for() and time.monotonic() - self._heard[endpoint] > 3 * self._every:
            self._heard[endpoint] = time.monotonic()
            link.break_off()
