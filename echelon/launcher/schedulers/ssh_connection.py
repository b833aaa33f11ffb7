"""``SshConnection``: the launcher on one host of a job over ssh, its connection and its output."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from echelon.launcher.schedulers import remote_main

_source = Path(remote_main.__file__).read_bytes()
#: Prevents that lines of two hosts are mixed.
_console = threading.Lock()


@dataclass(frozen=True)
class RemoteLaunchRequest:
    """The line that remote_main.py reads: the launcher's arguments, directory and environment."""

    argv: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    hail: bool
    patience: float

    @property
    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class SshConnection:
    """A launcher on one host. ``ssh`` is empty for this host itself: then remote_main.py runs locally.

    The first host's output is shown unchanged as the job's; each line of another host begins with its name.
    """

    def __init__(self, name: str, order: RemoteLaunchRequest, python: str, ssh: tuple[str, ...], first: bool) -> None:
        self.name = name
        self.first = first
        self.by_ssh = bool(ssh)
        #: True if a launcher runs, or ran, there; otherwise ``early`` has the reason
        self.started = not ssh
        self.early: list[str] = []
        bootstrap = [python, "-c", f"import sys; exec(sys.stdin.buffer.read({len(_source)}))"]
        self._process = subprocess.Popen(
            [*ssh, shlex.join(["exec", *bootstrap])] if ssh else bootstrap,
            stdin=subprocess.PIPE,
            stdout=None if first else subprocess.PIPE,
            stderr=None if first and not ssh else subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C at the terminal reaches only this process, which forwards it
        )
        self._readers = self._relay()
        self._send(_source + order.line)

    def forward_signal(self, number: signal.Signals) -> None:
        """Forward a signal. A connection that is not established yet is killed instead."""
        if self.started:
            self._send(number.name.encode() + b"\n")
        else:
            self._process.kill()

    def hang_up(self) -> None:
        """Close the input of the remote end, which then ends its launcher."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()

    def wait(self) -> int:
        """Wait until it has ended and all its output was shown; return the exit code, 128+n for signal n."""
        for reader in self._readers:
            reader.join()
        code = self._process.wait()
        self.hang_up()
        return code if code >= 0 else 128 - code

    def _send(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed: wait() reports that
            while data:  # without Python's buffer, which is not reentrant in signal handlers
                data = data[os.write(stdin.fileno(), data) :]

    def _relay(self) -> list[threading.Thread]:
        taken: list[tuple[IO[bytes] | None, Callable[[str], None]]] = [
            (self._process.stdout, lambda line: self._show(line, sys.stdout)),
            (self._process.stderr, self._hear),
        ]
        readers = [threading.Thread(target=_read, args=pair, daemon=True) for pair in taken if pair[0] is not None]
        for reader in readers:
            reader.start()
        return readers

    def _hear(self, line: str) -> None:
        """Handle a line of stderr: before the launcher runs, keep messages of ssh and shell in case it never does."""
        if self.started:
            self._show(line, sys.stderr)
        elif line.rstrip() == remote_main.HAIL:
            self.started = True
        else:
            self.early.append(line.strip())

    def _show(self, line: str, where: IO[str]) -> None:
        with _console:
            where.write(line if self.first else f"[{self.name}] {line}")
            where.flush()


def _read(stream: IO[bytes], heard: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            heard(line.decode(errors="replace"))
