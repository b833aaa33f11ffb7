"""Hosts on one switch, on this machine: a network namespace each, with links as slow as asked for. Linux, root.

A namespace lives as long as the processes in it, and every process started here dies with the one that started it,
however that ends: nothing is left behind, and as no namespace has a name, two networks never meet.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

UNLIMITED = "unlimited"
INTERFACE = "eth0"
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def bits_per_second(rate: str) -> float:
    """``"100mbit"`` as a number; infinity for ``"unlimited"``. ValueError for anything else."""
    if rate == UNLIMITED:
        return float("inf")
    found = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if found is None:
        raise ValueError(f"'{rate}' is no rate; write one such as 100mbit, 2.5gbit, {UNLIMITED}")
    return float(found[1]) * _BITS[found[2]]


class Network:
    """``with Network(4) as network``: four hosts, ``network.addresses``, that reach each other over ``eth0``."""

    def __init__(self, hosts: int) -> None:
        self.addresses = [f"10.77.0.{number + 1}" for number in range(hosts)]
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._switch = self._namespace("switch")
            self._in(self._switch, "ip", "link", "add", "switch", "type", "bridge")
            self._in(self._switch, "ip", "link", "set", "switch", "up")
            self._hosts = [self._plug_in(port, address) for port, address in enumerate(self.addresses)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for keeper in self._keepers:
            with keeper:  # closes its pipes, too
                keeper.kill()

    def limit(self, rate: str) -> None:
        """From now on every host sends and receives at this rate, both at once."""
        for port, host in enumerate(self._hosts):
            self._shape(host, INTERFACE, rate)
            self._shape(self._switch, f"port{port}", rate)

    def acknowledge_at_once(self) -> None:
        """Linux waits 40 ms with an acknowledgement that it may send along with data. Who sends 64 KB may wait for it,
        or not, by chance: steps of a pipeline then take 100 ms or 180."""
        for host in self._hosts:
            route = ("10.77.0.0/24", "dev", INTERFACE, "quickack", "1", "initcwnd", "64")
            self._in(host, "ip", "route", "change", *route)

    def limit_host(self, host: int, rate: str) -> None:
        """The same for one of them only."""
        self._shape(self._hosts[host], INTERFACE, rate)
        self._shape(self._switch, f"port{host}", rate)

    def cut(self, host: int) -> None:
        """Pull its cable at the switch: the host itself sees nothing but silence."""
        self._in(self._switch, "ip", "link", "set", f"port{host}", "nomaster")

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes],
        out: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """The command on that host; what it says on stderr goes to ``log``. Input and output are piped, unbuffered,
        unless ``out`` is there to take the output."""
        return subprocess.Popen(
            [*_enter(self._hosts[host]), *_DIES_WITH_US, *command],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=out or subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for us; we end them
        )

    def _namespace(self, name: str) -> int:
        """A new network namespace, kept by a process that does nothing; its process id.

        A host is called by its address: a library that looks up the host's own name (Horovod does) finds it so.
        """
        keeper = subprocess.Popen(
            [*_DIES_WITH_US, "unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise PermissionError("network namespaces cannot be made here; run as root on Linux")
        return keeper.pid

    def _plug_in(self, port: int, address: str) -> int:
        host, name = self._namespace(address), f"port{port}"
        peer = ("peer", "name", INTERFACE, "netns", str(host))
        self._in(self._switch, "ip", "link", "add", name, "type", "veth", *peer)
        self._in(self._switch, "ip", "link", "set", name, "master", "switch", "up")
        self._in(host, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
        for interface in (INTERFACE, "lo"):
            self._in(host, "ip", "link", "set", interface, "up")
        return host

    def _shape(self, namespace: int, interface: str, rate: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # there is none at first
            self._in(namespace, "tc", "qdisc", "delete", "dev", interface, "root")
        if rate == UNLIMITED:
            return
        # A bucket lets a short message through at once. It holds 1 ms of the rate, lest small messages look free,
        # and at least 32 KB, which the slowest rates need to reach their rate at all.
        burst = max(32_768, int(bits_per_second(rate) / 8 / 1000))
        shaper = ("tbf", "rate", rate, "burst", str(burst), "latency", "50ms")
        self._in(namespace, "tc", "qdisc", "add", "dev", interface, "root", *shaper)

    def _in(self, namespace: int, *command: str) -> None:
        subprocess.run([*_enter(namespace), *command], check=True, capture_output=True)


def _enter(namespace: int) -> list[str]:
    return ["nsenter", "--target", str(namespace), "--net", "--uts"]


def bytes_sent() -> int:
    """Return the bytes that this host has sent. /sys shows the namespace that mounted it, /proc one's own."""
    with open("/proc/self/net/dev", encoding="ascii") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACE:
                return int(counters.split()[8])
    raise OSError(f"this host has no {INTERFACE}")
