"""A server's channels to the other servers of its job."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NoAnswer

from echelon.base.errors import PeerLost
from echelon.base.security import Security
from echelon.parameter_server.protocol.channel import ServerChannel
from echelon.parameter_server.protocol.message import WireMessage

#: Seconds that a server waits for another one: enough for a killed server to be restarted.
PATIENCE = 20.0


class ServerPeers:
    """Channels that are opened when they are first needed, and again after their server was lost."""

    def __init__(self, endpoints: Sequence[str], security: Security, patience: float = PATIENCE) -> None:
        self._endpoints, self._security, self._patience = list(endpoints), security, patience
        self._links: dict[int, ServerChannel] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, server: int, frame: WireMessage) -> WireMessage:
        """Send a message to another server and return its answer. Raises ``PeerLost`` if there is none in time."""
        link = self._link(server)
        try:
            return link.send(frame).result(self._patience)
        except (PeerLost, NoAnswer) as error:
            self._forget(server, link)
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(f"{link.name} at {link.endpoint} has not answered for {self._patience:g} s") from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    def _link(self, server: int) -> ServerChannel:
        with self._lock:
            if self._closed:
                raise PeerLost(f"this server is shutting down; server {server} got no request")
            if server not in self._links:
                endpoint = self._endpoints[server]
                self._links[server] = ServerChannel(
                    endpoint, security=self._security, timeout=self._patience, name=f"server {server}"
                )
            return self._links[server]

    def _forget(self, server: int, link: ServerChannel) -> None:
        with self._lock:
            if self._links.get(server) is link:
                del self._links[server]
        link.close()
