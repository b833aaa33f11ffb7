"""The actor on a node of a Ray cluster: runs the ordinary launcher, whose output is fetched remotely.

It imports nothing of Echelon: ray.py sends its source by value, so that actors need not import torch, which takes
seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

#: Seconds that ``news`` waits for output.
_WAIT = 5.0


@dataclass(frozen=True)
class LauncherOutput:
    """A launcher's output since the last call, as (out or err, line), and its exit code once it has ended."""

    node: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    code: int | None = None


class RayHost:
    """The class that ray.py makes into an actor. When it dies, remote_main.py sees the end of its input.

    remote_main.py then kills the launcher instead of terminating it: a terminated launcher leaves the rendezvous, and
    the other launchers would not wait for a replacement. The launcher's OrphanReaper ends the ranks.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: queue.SimpleQueue[tuple[str, str] | int] = queue.SimpleQueue()
        self._unsent: list[str] = []
        self._order = threading.Lock()

    def master_endpoint(self) -> tuple[str, int]:
        """Return address and a free port of this node, as other nodes reach it."""
        address = _address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as free:
            free.bind((address, 0))
            return address, int(free.getsockname()[1])

    def start(self, argv: list[str], directory: str, environment: dict[str, str]) -> None:
        """Start the launcher. The secret is in ``environment`` only, because Ray logs the actors' own variables."""
        order: dict[str, Any] = {
            "argv": [sys.executable, "-m", "echelon", "run", *argv],
            "directory": directory,
            "environment": environment,
            "hail": False,
            "patience": 0.0,
        }
        with contextlib.suppress(OSError):  # Ray lowers the priority of its workers; ranks should not have it
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with self._order:
            self._process = subprocess.Popen(
                [sys.executable, "-I", _far_end()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for line in (json.dumps(order), *self._unsent):
                self._send(line)
        streams = [("out", self._process.stdout), ("err", self._process.stderr)]
        readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()

    def news(self) -> LauncherOutput:
        """Return new output, after a short wait for some; the exit code comes after the last line."""
        lines: list[tuple[str, str]] = []
        with contextlib.suppress(queue.Empty):
            said = self._said.get(timeout=_WAIT)
            while not isinstance(said, int):
                lines.append(said)
                said = self._said.get(block=False)
            return LauncherOutput(_name(), lines, said)
        return LauncherOutput(_name(), lines)

    def forward_signal(self, name: str) -> None:
        """Forward a signal; it is kept until ``start``, because calls of a threaded actor may overtake one another."""
        with self._order:
            if self._process is None:
                self._unsent.append(name)
            else:
                self._send(name)

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, which ``news`` reports
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._said.put((name, line.decode(errors="replace")))

    def _wait(self, readers: list[threading.Thread]) -> None:
        for reader in readers:
            reader.join()
        assert self._process is not None
        code = self._process.wait()
        self._said.put(code if code >= 0 else 128 - code)


def _far_end() -> str:
    """Return the path of the bootstrap script on this node; finding the package does not import it."""
    package = importlib.util.find_spec("echelon")
    assert package is not None, "echelon is not installed on this node"
    assert package.origin is not None
    return str(Path(package.origin).parent / "launcher" / "schedulers" / "remote_main.py")


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _name() -> str:
    """Return the address and the beginning of the node's id: several nodes may share an address."""
    import ray

    return f"{_address()}/{ray.get_runtime_context().get_node_id()[:8]}"
