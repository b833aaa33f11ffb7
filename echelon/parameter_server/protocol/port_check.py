"""``check_port``: see that a server can listen at its endpoint, before anything is started for it.

gRPC has one text for all that can be wrong with an address: "Server did not start properly".
"""

from __future__ import annotations

import errno
import socket

from echelon.base.endpoints import split_endpoint
from echelon.base.errors import UsageError

_REASONS = {
    errno.EADDRINUSE: "the port is in use by another program; choose a free one, the same in every list of servers",
    errno.EADDRNOTAVAIL: "no interface of this host has that address; write it as this host's interfaces do",
    errno.EACCES: "this user may not listen on that port; choose one above 1023",
}


def check_port(endpoint: str) -> None:
    """Raise a ``UsageError`` that says why no server can listen at ``endpoint``."""
    host, port = split_endpoint(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was left a moment ago is free
            probe.bind(address)
            probe.listen(1)  # two sockets may be bound to one port, but one alone can listen
    except OSError as error:
        why = _REASONS.get(error.errno or 0) or f"{error.strerror or error}; use a free port of this host"
        raise UsageError(f"endpoint {endpoint}: {why}") from None
