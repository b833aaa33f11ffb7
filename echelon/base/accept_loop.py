"""``AcceptLoop``: a listening port with a bound on connections without a proof, with a thread for each connection."""

from __future__ import annotations

import contextlib
import functools
import resource
import socket
import threading
import time
from collections.abc import Callable

#: Limit of connections without a proof. The proof takes one round trip; hundreds of ranks connect at once.
UNPROVEN = 256
#: ``know`` is an argument since the first caller can be there before the constructor has returned.
Serve = Callable[[socket.socket, Callable[[], None]], None]
_PAUSE = 0.05  # seconds without a free file descriptor


class AcceptLoop:
    """Accepts connections and calls ``serve(connection, know)`` in a thread for each; after a proof it calls ``know``.

    Beyond ``unproven`` connections without a proof, and when file descriptors run out, the one that has waited longest
    is closed: a process that knows the secret would have proven it long before.
    """

    def __init__(self, listener: socket.socket, serve: Serve, name: str, unproven: int = UNPROVEN) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._listener, self._serve, self._name = listener, serve, name
        self._most = min(unproven, descriptors // 4)  # files of this process need descriptors, too
        self._unproven: dict[socket.socket, None] = {}
        self._connections: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _know(self, caller: socket.socket) -> None:
        """Mark a connection as one of the job."""
        with self._lock:
            self._unproven.pop(caller, None)

    def close(self) -> None:
        """Stop listening; open connections stay open."""
        self._closed = True
        shut(self._listener)

    def cut(self) -> None:
        """Cut all connections; their threads close them."""
        with self._lock:
            for caller in self._connections:
                cut(caller)

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._drop_oldest()  # no file descriptor is left, or the caller has gone again
                time.sleep(_PAUSE)
                continue
            with self._lock:
                self._unproven[caller] = None
                self._connections.add(caller)
                crowded = len(self._unproven) > self._most
            if crowded:
                self._drop_oldest()
            self._start(caller)

    def _start(self, caller: socket.socket) -> None:
        try:
            threading.Thread(target=self._tend, args=(caller,), name=f"{self._name} connection", daemon=True).start()
        except RuntimeError:  # the system has no room for another thread
            self._forget(caller)

    def _tend(self, caller: socket.socket) -> None:
        try:
            self._serve(caller, functools.partial(self._know, caller))
        finally:
            self._forget(caller)

    def _forget(self, caller: socket.socket) -> None:
        with self._lock:
            self._unproven.pop(caller, None)
            self._connections.discard(caller)
        caller.close()

    def _drop_oldest(self) -> None:
        with self._lock:
            if (oldest := next(iter(self._unproven), None)) is not None:
                del self._unproven[oldest]
                cut(oldest)


def cut(connection: socket.socket) -> None:
    """Wake the threads that are blocked in a connection; they get an end or an error."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def shut(connection: socket.socket) -> None:
    """Close a socket, and wake the thread that is blocked in it."""
    cut(connection)
    connection.close()
