"""This host's addresses, network interfaces and ports."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from echelon.environment import LOOPBACK
from echelon.errors import UsageError

_SIOCGIFADDR = 0x8915


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str | None:
    """The interface's IPv4 address; ``None`` when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_with(address: str) -> str | None:
    """The interface that carries ``address``; ``None`` when that cannot be told."""
    if address.startswith("127."):
        address = LOOPBACK
    return next((name for name in interfaces() if address_of(name) == address), None)


def resolve(host: str, option: str = "--master") -> str:
    """The numeric address of ``host``, IPv4 where there is one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{option} names the host '{host}', which has no address: {error.strerror}") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_local(address: str) -> bool:
    """Whether ``address`` belongs to this host: only then can a socket be bound to it."""
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(address: str, port: int) -> str:
    """The address by which this host is seen from ``address``. Nothing is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise UsageError(f"--master {address}:{port} cannot be reached: {error.strerror}") from None
        return str(probe.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def answers(address: str, port: int, timeout: float) -> bool:
    """Whether somebody accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=timeout):
        return True
    return False


def free_ports(address: str, count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket(_family(address), socket.SOCK_STREAM)) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
