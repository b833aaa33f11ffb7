"""This host's addresses, network interfaces and ports."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import random
import resource
import socket
import struct
from dataclasses import dataclass

from echelon.base.environment import LOOPBACK
from echelon.base.errors import EchelonError, UsageError

#: Ports for later use: below the kernel's ephemeral ports, and apart from the ports of ``port_for``.
LATER = range(15000, 20000)

#: Seconds of silence, then the interval and number of probes: a broken connection is detected after 25 s.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}

_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCETHTOOL = 0x8915, 0x8913, 0x8921, 0x8946
_IFF_UP = 0x1
_ETHTOOL_GSET, _UNKNOWN_SPEED = 0x1, 0xFFFFFFFF


@dataclass(frozen=True)
class Nic:
    """A network interface; ``speed`` is in Mb/s, and ``None`` stands for an unknown value."""

    name: str
    address: str | None
    up: bool
    mtu: int | None
    speed: int | None


@dataclass(frozen=True)
class NetworkRoute:
    """The route to an address: the interface, and the gateway or ``None``."""

    interface: str
    gateway: str | None


def nics() -> list[Nic]:
    """Return all interfaces of this host. The kernel is asked; /sys shows the network namespace that mounted it."""
    return [Nic(name, address_of(name), _is_up(name), _mtu(name), _speed(name)) for name in interfaces()]


def route_to(address: str, table: str) -> NetworkRoute | None:
    """Return the route to an IPv4 address in the kernel's table (/proc/net/route): longest prefix, lowest metric."""
    wanted, found = int(ipaddress.IPv4Address(address)), []
    for line in table.splitlines()[1:]:
        words = line.split()
        target, gateway, mask = (socket.ntohl(int(words[column], 16)) for column in (1, 2, 7))
        if wanted & mask == target:
            found.append((-mask.bit_count(), int(words[6]), words[0], gateway))
    if not found:
        return None
    _, _, interface, gateway = min(found)
    return NetworkRoute(interface, str(ipaddress.IPv4Address(gateway)) if gateway else None)


def own_name_address() -> str | None:
    """Return the address of this host's own name, ``None`` without one: Gloo uses it unless an interface is set."""
    try:
        return resolve(socket.gethostname())
    except UsageError:
        return None


def _ioctl(question: int, request: bytes) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, question, request)
        except OSError:
            return None


def _is_up(interface: str) -> bool:
    answer = _ioctl(_SIOCGIFFLAGS, struct.pack("256s", interface.encode()[:15]))
    return answer is not None and bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)


def _mtu(interface: str) -> int | None:
    answer = _ioctl(_SIOCGIFMTU, struct.pack("256s", interface.encode()[:15]))
    return None if answer is None else int(struct.unpack_from("i", answer, 16)[0])


def _speed(interface: str) -> int | None:
    """Return the speed in Mb/s. ``struct ethtool_cmd`` has it in two halves, at bytes 12 and 28."""
    command = array.array("B", struct.pack("I40x", _ETHTOOL_GSET))
    request = struct.pack("16sP16x", interface.encode()[:15], command.buffer_info()[0])
    if _ioctl(_SIOCETHTOOL, request) is None:
        return None
    low, high = struct.unpack_from("H", command, 12)[0], struct.unpack_from("H", command, 28)[0]
    speed = int(low) | int(high) << 16
    return None if speed in (0, 0xFFFF, _UNKNOWN_SPEED) else speed


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str | None:
    """Return the interface's IPv4 address; ``None`` if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_with(address: str) -> str | None:
    """Return the interface that has ``address``; ``None`` if it is unknown."""
    if address.startswith("127."):
        address = LOOPBACK
    return next((name for name in interfaces() if address_of(name) == address), None)


def resolve(host: str, option: str = "--master") -> str:
    """Return the numeric address of ``host``, IPv4 if there is one."""
    try:
        result = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{option} names the host '{host}', which has no address: {error.strerror}") from None
    result.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(result[0][4][0])


def is_local(address: str) -> bool:
    """Return True if ``address`` belongs to this host: only then can a socket be bound to it."""
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(address: str, port: int) -> str:
    """Return this host's address as seen from ``address``. No packet is sent."""
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


def stay_alert(connection: socket.socket) -> None:
    """Enable keepalive probes: a host that vanished does not close its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors: each remote rank takes three, so the usual 1024 serve only a few hundred."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < enough:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def answers(address: str, port: int, timeout: float) -> bool:
    """Return True if connections are accepted at ``address:port``."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=timeout):
        return True
    return False


def free_ports(address: str, count: int) -> list[int]:
    """Return different ports that are free now, for processes that will listen on them.

    Until they listen, which may take seconds, the kernel does not assign these ports as ephemeral ones.
    """
    result: list[int] = []
    for port in random.SystemRandom().sample(LATER, len(LATER)):  # a seed set by the user is the same in every process
        if len(result) == count:
            return result
        with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port closed a moment ago counts as free
            probe.bind((address, port))
            result.append(port)
    raise EchelonError(f"{address} has no {count} free ports between {LATER[0]} and {LATER[-1]}; free some")


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
