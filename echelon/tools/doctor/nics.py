"""Reachability of every host's interfaces from every other host, by real connections to a fresh port on each address.

A listener answers with a random token of its host. Two hosts often have the same address on an internal interface
(docker0, loopback), and a host that connects to such an address reaches itself.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from echelon.base import network

#: Seconds for one connection; number of concurrent connections.
PATIENCE, _AT_ONCE = 3.0, 32
REACHED = ""


class ProbeListeners:
    """A listening port on every address of this host, until closed. ``card`` has the token and the addresses."""

    def __init__(self, nics: list[network.Nic]) -> None:
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
    found: dict[int, dict[str, str]] = {host: {} for host in cards}
    for (host, nic, *_), answer in zip(calls, answers, strict=True):
        found[host][nic] = answer
    return found
