"""Stores of launchers on a simulated network: torch's ``TCPStore`` and the functions that open one.

A call takes a moment, waits while the link is cut or the serving process is stopped, as over TCP, and fails when the
serving process has died. If its whole host has died nothing answers, and the call fails only when TCP gives up.
"""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable
from typing import Any, TypeVar

from scheduler import Scheduler, SimulatedProcess, Task, active

from echelon.base.errors import PeerLost

#: Seconds after which TCP gives up on a host that does not answer.
GIVEN_UP = 25.0
LOOK = 0.25

T = TypeVar("T")
Endpoint = tuple[str, int]


class StoreTable:
    """The keys of one store, in the process that serves it."""

    def __init__(self, owner: SimulatedProcess, endpoint: Endpoint) -> None:
        self.owner, self.endpoint = owner, endpoint
        self.values: dict[str, bytes] = {}


class HostNetwork:
    """The hosts of a job: their stores by endpoint, and the links between them.

    cut:   pairs of hosts (from, to) between which nothing arrives
    dark:  hosts without power; nothing on them answers, not even with a refusal
    """

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.tables: dict[Endpoint, StoreTable] = {}
        self.cut: set[tuple[str, str]] = set()
        self.dark: set[str] = set()
        self.slow: dict[str, float] = {}  #: seconds that each message of a host takes more
        self.signs: dict[tuple[str, int], SimulatedProcess] = {}
        self._ports = itertools.count(30_000)

    def passes(self, one: str, other: str) -> bool:
        """Return True if hosts can talk: TCP needs both directions."""
        return one == other or not {(one, other), (other, one)} & self.cut

    def latency(self, one: str, other: str) -> float:
        return self.rng.expovariate(1 / 0.001) + self.slow.get(one, 0.0) + self.slow.get(other, 0.0)

    # ---- what code under simulation calls ----

    def serve_store(self, address: str, port: int, token: bytes | None, timeout: Any) -> tuple[SimulatedStore, int]:
        port = port or next(self._ports)
        known = self.tables.get((address, port))
        if known is not None and not known.owner.dead:
            raise OSError(98, "Address already in use")
        table = self.tables[address, port] = StoreTable(own_process(), (address, port))
        return SimulatedStore(self, table), port

    def close(self, table: StoreTable) -> None:
        if table.owner is own_process() and self.tables.get(table.endpoint) is table:
            del self.tables[table.endpoint]

    def local_endpoint(self, address: str, port: int, token: bytes | None) -> Endpoint:
        if not self.answers(address, port, 10.0):
            raise PeerLost(f"the launcher at {address}:{port} cannot be reached: Connection refused")
        return address, port

    def answers(self, address: str, port: int, timeout: float) -> bool:
        table, here = self.tables.get((address, port)), own_process().host
        there = host_of(address)
        if not self.passes(here, there) or there in self.dark:
            self.scheduler.sleep(timeout)
            return False
        self.scheduler.sleep(self.latency(here, there))
        return table is not None and not table.owner.dead

    def connect(self, address: str, port: int, **_: Any) -> SimulatedStore:
        if not self.answers(address, port, 60.0):
            raise RuntimeError("Connection refused")
        store = SimulatedStore(self, self.tables[address, port])
        store.check([])  # torch's client asks the server for an answer
        return store

    def free_ports(self, address: str, count: int) -> list[int]:
        return [next(self._ports) for _ in range(count)]

    def is_local(self, address: str) -> bool:
        return host_of(address) == own_process().host

    def reserve(self, port: int) -> bool:
        """Reserve a port among the launchers of a host, as ``_hang_out_sign`` does."""
        here = own_process()
        holder = self.signs.get((here.host, port))
        if holder is not None and holder is not here and not holder.dead:
            return False
        self.signs[here.host, port] = here
        return True


class SimulatedStore:
    """A client of a store."""

    def __init__(self, network: HostNetwork, table: StoreTable) -> None:
        self._network, self.table = network, table

    def set(self, key: str, value: str | bytes) -> None:
        self._call(lambda: self.table.values.update({key: _as_bytes(value)}))

    def get(self, key: str) -> bytes:
        return self._call(lambda: self.table.values[key])

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: all(key in self.table.values for key in keys))

    def delete_key(self, key: str) -> bool:
        return self._call(lambda: self.table.values.pop(key, None) is not None)

    def add(self, key: str, amount: int) -> int:
        def act() -> int:
            total = int(self.table.values.get(key, b"0")) + amount
            self.table.values[key] = str(total).encode()
            return total

        return self._call(act)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        def act() -> bytes:
            known = self.table.values.get(key)
            if known == expected.encode() or (known is None and not expected):
                self.table.values[key] = value.encode()
            return self.table.values.get(key, expected.encode())

        return self._call(act)

    def _call(self, act: Callable[[], T]) -> T:
        """Carry a request there and its answer back; what was done there stays done if the answer is lost."""
        self._travel()
        result = act()
        self._travel()
        return result

    def _travel(self) -> None:
        here, owner, scheduler = own_process(), self.table.owner, self._network.scheduler
        if owner is here:
            scheduler.pause()
            return
        scheduler.sleep(self._network.latency(here.host, owner.host) / 2)
        until = scheduler.now + GIVEN_UP
        while owner.stopped or owner.host in self._network.dark or not self._network.passes(here.host, owner.host):
            scheduler.sleep(LOOK)
            if scheduler.now > until and not owner.stopped:
                raise RuntimeError("Connection timed out")
        if owner.dead or self._network.tables.get(self.table.endpoint) is not self.table:
            raise RuntimeError("Connection reset by peer")


class SimulatedSimpleQueue:
    """``queue.SimpleQueue`` on the scheduler."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiting: list[tuple[Task, int]] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        active().wake(self._waiting, 1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = None if timeout is None else active().now + timeout
        while not self._items:
            left = None if until is None else until - active().now
            if left is not None and left <= 0:
                raise queue.Empty
            active().block(self._waiting, left)
        return self._items.pop(0)


class QueueModule:
    """The part of ``queue`` that launchers use."""

    SimpleQueue, Empty = SimulatedSimpleQueue, queue.Empty


def own_process() -> SimulatedProcess:
    process = active().current.process
    assert process is not None
    return process


def address_of(host: str) -> str:
    return "10.0.0." + host.removeprefix("host-")


def host_of(address: str) -> str:
    return "host-" + address.rpartition(".")[2]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
