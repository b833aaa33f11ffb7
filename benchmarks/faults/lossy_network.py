"""Hosts on a switch that loses, doubles and delays packets: a process in place of tc's netem, which few kernels have.

Each host is a network namespace with a TAP device; this process passes on what it reads there. Linux, root.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time

from benchmarks.support.network import INTERFACE, Network

_TUNSETIFF, _TAP, _NO_PI, _NEW_NET = 0x400454CA, 0x0002, 0x1000, 0x40000000
BROADCAST = b"\xff" * 6


class LossyNetwork(Network):
    """``Network`` with links that can be spoiled one by one.

    lost, doubled, late: packets that did not arrive, that arrived twice, and that others have overtaken, so far
    """

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts)
        self.lost = self.doubled = self.late = 0
        self._taps: list[int] = []
        self._spoiled: dict[int, tuple[float, float, float]] = {}
        self._ports: dict[bytes, int] = {}  # by hardware address, as they were seen
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count, self._draw, self._over = itertools.count(), random.Random(1), False
        self._switching = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> LossyNetwork:
        super().__enter__()
        self._switching.start()
        return self

    def close(self) -> None:
        self._over = True
        if self._switching.is_alive():
            self._switching.join()
        for tap in self._taps:
            os.close(tap)
        self._taps = []
        super().close()

    def spoil(self, host: int, *, lose: float = 0.0, double: float = 0.0, delay: float = 0.0) -> None:
        """Lose and double such parts of the packets to and from a host, and delay each by up to ``delay`` seconds."""
        self._spoiled[host] = (lose, double, delay)

    def cut(self, host: int) -> None:
        self.spoil(host, lose=1.0)

    def _plug_in(self, port: int, address: str) -> int:
        host = self._namespace(address)
        opening = threading.Thread(target=lambda: self._taps.append(_tap_in(host)))  # its namespace is the thread's
        opening.start()
        opening.join()
        self._in(host, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
        for interface in (INTERFACE, "lo"):
            self._in(host, "ip", "link", "set", interface, "up")
        return host

    def _pass_on(self) -> None:
        while not self._over:
            wait = min(0.1, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.1
            for tap in select.select(self._taps, [], [], wait)[0]:
                frame = os.read(tap, 65536)
                port = self._taps.index(tap)
                self._ports[frame[6:12]] = port
                known = self._ports.get(frame[:6])
                for to in range(len(self._taps)) if known is None else [known]:
                    if to != port:
                        self._carry(port, to, frame)
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(self._due)
                os.write(self._taps[to], frame)

    def _carry(self, port: int, to: int, frame: bytes) -> None:
        for end in (port, to):
            lose, double, delay = self._spoiled.get(end, (0.0, 0.0, 0.0))
            if self._draw.random() < lose:
                self.lost += 1
                return
            copies = 1 + (self._draw.random() < double)
            self.doubled += copies - 1
            if end in self._spoiled:
                for _ in range(copies):
                    at = time.monotonic() + self._draw.uniform(0.0, delay)
                    self.late += any(due > at and where == to for due, _, where, _ in self._due)
                    heapq.heappush(self._due, (at, next(self._count), to, frame))
                return
        os.write(self._taps[to], frame)


def _tap_in(host: int) -> int:
    """Return a new TAP device in the namespace of a process; the calling thread stays in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{host}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _TAP | _NO_PI))
    return tap
