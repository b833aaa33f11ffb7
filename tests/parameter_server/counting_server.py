"""A server process for tests of the network: it keeps a sum in a file, so that it can be killed and come back."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import context, free_port

from echelon.base.security import OPEN, Security
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.server_port import ServerPort

DIM = 16


def rows_of(ids: np.ndarray) -> np.ndarray:
    """Return the answer to a pull: numbers that only the right ids in the right order give."""
    return ((ids % 1009)[:, None] * np.arange(1, DIM + 1)).astype(np.float32)


class Counting:
    """push {seq} [values]: adds their sum, once for each seq, on disk before it answers. pull [ids]: ``rows_of``."""

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.lock = file, threading.Lock()
        self.state: dict[str, Any] = {"seq": -1, "total": 0, "duplicates": 0, "order": []}
        if file is not None and file.exists():
            self.state = json.loads(file.read_text())

    def handle(self, frame: WireMessage, gone: Callable[[], bool]) -> WireMessage:
        op = frame.head.get("op")
        if op == "pull":
            return WireMessage({"ok": True, "version": 3}, [rows_of(frame.arrays[0])])
        if op == "push":
            return self._push(frame)
        if op == "echo":
            return WireMessage(frame.head, [array.copy() for array in frame.arrays])
        if op == "wait":
            Path(frame.head["seen"]).write_text("waits")
            while not gone() and not Path(frame.head["until"]).exists():
                time.sleep(0.01)
            Path(frame.head["seen"]).write_text(str(gone()))
            return WireMessage({"ok": True})
        if op == "fail":
            raise ZeroDivisionError("a mistake\nof ours")
        return WireMessage({"ok": True, **self.state, "seen": frame.head})

    def _push(self, frame: WireMessage) -> WireMessage:
        with self.lock:
            duplicate = frame.head["seq"] <= self.state["seq"]
            if duplicate:
                self.state["duplicates"] += 1
            else:
                self.state["seq"] = frame.head["seq"]
                self.state["order"].append(frame.head["seq"])
                self.state["total"] += int(frame.arrays[0].sum())
            if self.file is not None:
                aside = self.file.with_suffix(".new")
                aside.write_text(json.dumps(self.state))
                aside.replace(self.file)
            return WireMessage({"ok": True, "duplicate": duplicate, "total": self.state["total"]})


def free_endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


def _serve(endpoint: str, file: Path | None, security: Security, ready: Any) -> None:
    server = ServerPort(endpoint, Counting(file).handle, security)
    ready.send(server.endpoint)
    signal.pause()


class Process:
    """A server in a process of its own."""

    def __init__(self, endpoint: str = "127.0.0.1:0", file: Path | None = None, security: Security = OPEN) -> None:
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(endpoint, file, security, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint: str = ours.recv()

    def freeze(self) -> None:
        """Stop the process; when this returns, none of its threads runs any more (the signal alone does not wait)."""
        os.kill(self._process.pid or 0, signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads.glob("*/stat")):
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def serving(**options: Any) -> Iterator[Process]:
    process = Process(**options)
    try:
        yield process
    finally:
        process.kill()
