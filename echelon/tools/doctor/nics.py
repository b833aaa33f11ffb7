"""Network interfaces of a host: those that Gloo and NCCL will choose, and those that other hosts reach.

Hosts probe each other by real connections to a fresh port on each address. A listener answers with a random token of
its host, because two hosts often have the same address on an internal interface (docker0, loopback), and a host that
connects to such an address reaches itself.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from echelon.base import network
from echelon.base.network import Nic

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
#: Interfaces that NCCL chooses last by default.
_INNER = ("lo", "docker", "virbr")
#: Seconds for one connection; number of concurrent connections.
PATIENCE, _AT_ONCE = 3.0, 32
REACHED = ""


# Choices of the libraries


@dataclass(frozen=True)
class NicChoice:
    """The interface that one library chooses on one host; ``nic`` is None if the library finds no interface.

    said: value of the library's environment variable; None if it is not set
    """

    variable: str
    said: str | None
    nic: str | None
    address: str | None

    @property
    def words(self) -> str:
        address = f" ({self.address})" if self.address else ""
        if self.said is not None:
            return f"{self.variable}={self.said}{address}"
        library = self.variable.partition("_")[0].replace("GLOO", "Gloo")
        taken = f"takes {self.nic}{address}" if self.nic else f"finds no interface{address}"
        return f"{library} {taken}, as {self.variable} is not set, which"


@dataclass(frozen=True)
class HostNics:
    """The interfaces of one host, and the choices of the libraries."""

    name: str
    nics: Sequence[Nic]
    choices: Sequence[NicChoice]


def gloo_choice(env: Mapping[str, str], nics: Sequence[Nic], own: str | None) -> NicChoice:
    """Return Gloo's choice: an interface that the variable names exactly, else that of the host's own address.

    own: address that the host's own name resolves to
    """
    if said := env.get(GLOO):
        names = said.split(",")
        return _choice(GLOO, said, next((nic for nic in nics if nic.name in names), None))
    if own is not None and own.startswith("127."):
        own_nic = next((nic for nic in nics if nic.address and nic.address.startswith("127.")), None)
    else:
        own_nic = next((nic for nic in nics if own is not None and nic.address == own), None)
    return NicChoice(GLOO, None, own_nic.name if own_nic else None, own)


def nccl_choice(env: Mapping[str, str], nics: Sequence[Nic]) -> NicChoice:
    """Return NCCL's choice: the first interface that matches the variable, else an ib..., else one not in ``_INNER``.

    The variable has prefixes of names; a leading ``=`` means exact names, a leading ``^`` excludes the names.
    """
    usable = [nic for nic in nics if nic.up and nic.address]
    if said := env.get(NCCL):
        return _choice(NCCL, said, next((nic for nic in usable if _matches(nic.name, said)), None))
    ordered = sorted(
        usable, key=lambda nic: 0 if nic.name.startswith("ib") else 2 if nic.name.startswith(_INNER) else 1
    )
    return _choice(NCCL, None, ordered[0] if ordered else None)


def _matches(name: str, said: str) -> bool:
    but, said = said.startswith("^"), said.removeprefix("^")
    exact, said = said.startswith("="), said.removeprefix("=")
    words = [word for word in said.split(",") if word]
    return any(name == word if exact else name.startswith(word) for word in words) is not but


def _choice(variable: str, said: str | None, nic: Nic | None) -> NicChoice:
    return NicChoice(variable, said, nic.name if nic else None, nic.address if nic else None)


# Probes


class ProbeListeners:
    """A listening port on every address of this host, until closed. ``card`` has the token and the addresses."""

    def __init__(self, nics: list[Nic]) -> None:
        self._word = secrets.token_hex(8)
        self._listeners: dict[str, socket.socket] = {}
        for nic in nics:
            if nic.up and nic.address is not None:
                with contextlib.suppress(OSError):
                    self._listeners[nic.name] = network.listen(nic.address, 0)
        self._closed = threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    @property
    def card(self) -> dict[str, Any]:
        where = {name: list(listener.getsockname()[:2]) for name, listener in self._listeners.items()}
        return {"word": self._word, "where": where}

    def close(self) -> None:
        self._closed.set()

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners.values():
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while self._listeners and not self._closed.is_set():
                for key, _ in selector.select(timeout=0.2):
                    assert isinstance(key.fileobj, socket.socket)
                    with contextlib.suppress(OSError), key.fileobj.accept()[0] as caller:
                        caller.sendall(self._word.encode())
        for listener in self._listeners.values():
            listener.close()


def probe_port(address: str, port: int, word: str) -> str:
    """Return ``REACHED``, or the reason why the port is not reached."""
    try:
        with socket.create_connection((address, port), timeout=PATIENCE) as connection:
            said = connection.makefile("rb").read(len(word))
    except TimeoutError:
        return f"no answer within {PATIENCE:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return REACHED if said == word.encode() else "another host has that address too"


def probe_hosts(cards: Mapping[int, Any]) -> dict[int, dict[str, str]]:
    """Probe all interfaces of all hosts; return ``REACHED`` or the reason for failure, by host and interface."""
    calls = [(host, nic, *door, card["word"]) for host, card in cards.items() for nic, door in card["where"].items()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda call: probe_port(*call[2:]), calls))
    result: dict[int, dict[str, str]] = {host: {} for host in cards}
    for (host, nic, *_), answer in zip(calls, answers, strict=True):
        result[host][nic] = answer
    return result
