"""A network in which connections break before or after a message, links are cut one way, and messages come late.

``SimulatedPort`` takes the place of ``ServerPort``, ``SimulatedConnection`` that of ``ServerConnection``. A stream
keeps the order of its messages, as TCP does. What a broken connection had under way may still arrive, so that a server
sees a request a second time, or an old one after its client has connected again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

from scheduler import Scheduler, SimulatedProcess, Task, active

from echelon.base.errors import UsageError
from echelon.parameter_server.protocol.connection import ServerConnectionLost
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.message_wire import PackedMessage, ReceivedMessage, receive
from echelon.parameter_server.server.server_port import answer_request

Endpoint = str


class SimulatedNetwork:
    """The links between processes.

    breaks:  probability, for each message, that its connection breaks
    late:    probability, for each message, that it takes up to 100 times as long
    cut:     pairs of hosts (from, to) between which nothing arrives
    """

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.ports: dict[Endpoint, SimulatedPort] = {}
        self.connections: list[SimulatedConnection] = []
        self.half_open: list[SimulatedConnection] = []
        self.breaks = self.late = 0.0
        self.cut: set[tuple[str, str]] = set()
        self.broken = 0

    def latency(self) -> float:
        return self.rng.expovariate(1 / 0.001) * (100 if self.rng.random() < self.late else 1)

    def passes(self, source: SimulatedProcess, target: SimulatedProcess) -> bool:
        return (source.host, target.host) not in self.cut

    def release(self, process: SimulatedProcess, silently: bool = False) -> None:
        """Close the ports and connections of a dead process; ``silently``: its peers do not learn of it."""
        for endpoint in [endpoint for endpoint, port in self.ports.items() if port.process is process]:
            del self.ports[endpoint]
        for connection in list(self.connections):
            if connection.process is process or connection.server is process:
                self.connections.remove(connection)
                if silently and connection.process is not process:
                    self.half_open.append(connection)
                else:
                    connection.break_down()

    def reset_half_open(self, endpoint: Endpoint) -> None:
        """Break the connections to an earlier process of a port, as its host does when it hears of them again."""
        for connection in [connection for connection in self.half_open if connection.endpoint == endpoint]:
            self.half_open.remove(connection)
            connection.break_down()


_networks: list[SimulatedNetwork] = []


def connect_network(network: SimulatedNetwork | None) -> None:
    _networks[:] = [network] if network is not None else []


def _own_process() -> SimulatedProcess:
    process = active().current.process
    assert process is not None
    return process


class SimulatedPort:
    """The port of a server."""

    def __init__(self, endpoint: str, handler: Callable[..., WireMessage], security: Any = None, **_: Any) -> None:
        self.endpoint, self.process, self.network = endpoint, _own_process(), _networks[-1]
        known = self.network.ports.get(endpoint)
        if known is not None and known.process.host == self.process.host and not known.process.dead:
            raise UsageError(f"cannot listen on {endpoint} (Address already in use)")
        self.network.ports[endpoint] = self
        self.network.reset_half_open(endpoint)
        self.handler, self.streams = handler, 0
        self.traffic = (0, 0)

    def close(self, patience: float = 1.0) -> bool:
        if self.network.ports.get(self.endpoint) is self:
            del self.network.ports[self.endpoint]
        return True


class SimulatedConnection:
    """One connection of a client, with at most one stream."""

    def __init__(self, endpoint: str, security: Any = None) -> None:
        self.endpoint, self.process, self.network = endpoint, _own_process(), _networks[-1]
        self.server: SimulatedProcess | None = None
        self._requests: list[tuple[float, Any]] = []
        self._answers: list[tuple[float, Any]] = []
        self._client_waits: list[tuple[Task, int]] = []
        self._server_waits: list[tuple[Task, int]] = []
        self._broken = self._hung_up = False
        self.network.connections.append(self)

    # ---- the client's side ----

    def ask(self, frame: WireMessage, seconds: float) -> WireMessage:
        """Send a request on a connection of its own and return the answer, or raise ``TimeoutError``."""
        self.write(PackedMessage.of(frame))
        return self.read(active().now + seconds)

    def _reach(self, timeout: float) -> SimulatedPort:
        """Return the server's port. Raises the error of a connection that is refused or gets no answer."""
        scheduler, port = active(), self.network.ports.get(self.endpoint)
        if port is not None and not self.network.passes(self.process, port.process):
            scheduler.sleep(timeout)
            raise TimeoutError("timed out")
        if port is None or port.process.dead:
            scheduler.sleep(self.network.latency())
            raise ConnectionRefusedError("Connection refused")
        return port

    def share_memory(self, seconds: float) -> None:
        """Share none: all messages go through this network."""

    def open(self, seconds: float) -> None:
        port = self._reach(seconds)
        active().sleep(self.network.latency())
        if port.process.dead:
            raise ConnectionRefusedError("Connection refused")
        self.server = port.process
        active().spawn(port.process, lambda: self._serve(port), "stream")

    def write(self, message: PackedMessage) -> None:
        if self._is_gone():
            raise OSError("Socket closed: the connection broke")
        copy = _carried(message)  # the caller may change its arrays after an answer
        self._requests.append((active().now + self.network.latency(), copy))
        if self.network.rng.random() < self.network.breaks:
            self.break_down()
            raise OSError("Socket closed: the connection broke")
        active().wake(self._server_waits)

    def read(self, until: float | None = None) -> WireMessage:
        while not self._answers:
            self._check()
            if until is not None and active().now >= until:
                raise TimeoutError("timed out")
            active().block(self._client_waits, None if until is None else until - active().now)
        due, answer = self._answers.pop(0)
        self._sleep_until(due)
        if self.network.rng.random() < self.network.breaks:
            self.break_down()
        self._check()
        return answer.unpacked()

    def _check(self) -> None:
        if self._hung_up or self._broken:
            raise ServerConnectionLost("the connection broke")

    def cut(self) -> None:
        """Make pending reads return with an error."""
        if not self._hung_up:
            self._hung_up = True
            active().wake(self._client_waits)
            active().wake(self._server_waits)

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(ValueError):
            self.network.connections.remove(self)

    def break_down(self) -> None:
        """Break the connection. Some of what is under way arrives all the same."""
        self._broken = True
        self.network.broken += 1
        del self._requests[self.network.rng.randint(0, len(self._requests)) :]
        active().wake(self._client_waits)
        active().wake(self._server_waits)

    # ---- the server's side ----

    def _serve(self, port: SimulatedPort) -> None:
        port.streams += 1
        try:
            self._answer_all(port)
        finally:
            port.streams -= 1

    def _answer_all(self, port: SimulatedPort) -> None:
        while True:
            while not self._requests:
                if self._broken or self._hung_up:
                    return
                active().block(self._server_waits)
            if not self.network.passes(self.process, port.process):
                active().sleep(0.5)
                continue
            due, request = self._requests.pop(0)
            self._sleep_until(due)
            answer = answer_request(port.handler, request, self._is_gone)
            while not self.network.passes(port.process, self.process) and not self._is_gone():
                active().sleep(0.5)
            self._answers.append((active().now + self.network.latency(), _carried(answer)))
            active().wake(self._client_waits)

    def _is_gone(self) -> bool:
        return self._broken or self._hung_up

    def _sleep_until(self, due: float) -> None:
        if due > active().now:
            active().sleep(due - active().now)


class _Carried:
    """The bytes of a message, as a stream has them."""

    memory = None  # shared with another process

    def __init__(self, message: PackedMessage) -> None:
        self._left = memoryview(b"".join(bytes(buffer) for buffer in message.buffers))

    def receive_into(self, buffers: list[Any]) -> None:
        for buffer in buffers:
            size = memoryview(buffer).nbytes
            memoryview(buffer).cast("B")[:] = self._left[:size]
            self._left = self._left[size:]


def _carried(message: PackedMessage) -> ReceivedMessage:
    stream: Any = _Carried(message)
    return receive(stream)
