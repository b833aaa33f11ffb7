"""One fork server for all pytest workers: importing torch and the rest takes 5 s of a core, for each server there is.

The process that deals out the tests starts it, and workers join. Only where multiprocessing is known from within; where
it is not, each worker has a server of its own, as ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import harness

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]
_PARTS = ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")
KNOWN = all(hasattr(_server, part) for part in _PARTS) and not hasattr(_server, "_forkserver_authkey")


def offer() -> dict[str, Any]:
    """Let workers find the server of this process, which is started if there is none."""
    if not KNOWN:
        return {}
    assert harness.context  # which says what the server imports
    with _unheard():
        _server.ensure_running()
    return {"pid": os.getpid(), "address": _server._forkserver_address, "alive": _server._forkserver_alive_fd}


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Start processes without output to the console of the tests, where it would stand between their dots."""
    kept = {number: os.dup(number) for number in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in kept:
            os.dup2(null, number)
        yield
    finally:
        for number, was in kept.items():
            os.dup2(was, number)
            os.close(was)
        os.close(null)


def join(offered: dict[str, Any]) -> None:
    """From here on, processes of this one are forked by the server that was offered."""
    if offered:
        _server._forkserver_address = offered["address"]
        # it lives for as long as any process has this open
        _server._forkserver_alive_fd = os.open(f"/proc/{offered['pid']}/fd/{offered['alive']}", os.O_WRONLY)
        _server.ensure_running = resource_tracker.ensure_running
