"""``check_port``: check that a server can listen at its endpoint, before anything is started for it."""

from __future__ import annotations

import errno
import socket
import time

from echelon.base.endpoints import split_endpoint
from echelon.base.errors import UsageError

_REASONS = {
    errno.EADDRINUSE: "the port is in use by another program; choose a free one, the same in every list of servers",
    errno.EADDRNOTAVAIL: "no interface of this host has that address; write it as this host's interfaces do",
    errno.EACCES: "this user may not listen on that port; choose one above 1023",
}


#: Seconds between two looks at a port that is in use.
LOOK = 0.1


def check_port(endpoint: str, wait: float = 0.0) -> None:
    """Check that a server can listen at ``endpoint``. Raises ``UsageError`` with the reason if it cannot.

    wait: seconds to wait for a port that is in use, such as that of a server that was killed a moment ago; default 0
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return _listen_once(endpoint)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(LOOK)
                continue
            why = _REASONS.get(error.errno or 0) or f"{error.strerror or error}; use a free port of this host"
            raise UsageError(f"endpoint {endpoint}: {why}") from None


def _listen_once(endpoint: str) -> None:
    host, port = split_endpoint(endpoint)
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a recently closed port counts as free
        probe.bind(address)
        probe.listen(1)  # two sockets can bind one port, but only one can listen
