"""One host of a job over ssh: the connection, what it was sent, and what came of it."""

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
#: Two hosts never write into one another's line.
_console = threading.Lock()


@dataclass(frozen=True)
class RemoteLaunchRequest:
    """What far.py reads: the launcher's words, and where and how to start it."""

    words: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    hail: bool
    patience: float

    @property
    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class SshConnection:
    """A launcher on one host. ``ssh`` is empty for this very host: then far.py runs here.

    The first host's output is the job's, and stays as it is; every line of another host's begins with its name.
    """

    def __init__(self, name: str, order: RemoteLaunchRequest, python: str, ssh: tuple[str, ...], first: bool) -> None:
        self.name = name
        self.first = first
        self.by_ssh = bool(ssh)
        #: whether a launcher runs, or ran, there; else ``early`` says what was in the way
        self.started = not ssh
        self.early: list[str] = []
        bootstrap = [python, "-c", f"import sys; exec(sys.stdin.buffer.read({len(_source)}))"]
        self._process = subprocess.Popen(
            [*ssh, shlex.join(["exec", *bootstrap])] if ssh else bootstrap,
            stdin=subprocess.PIPE,
            stdout=None if first else subprocess.PIPE,
            stderr=None if first and not ssh else subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is ours to hand on
        )
        self._readers = self._relay()
        self._send(_source + order.line)

    def tell(self, number: signal.Signals) -> None:
        """Hand a signal on. A connection that is not yet made is given up instead."""
        if self.started:
            self._send(number.name.encode() + b"\n")
        else:
            self._process.kill()

    def hang_up(self) -> None:
        """The launcher there is asked to end, and is ended if it does not."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()

    def wait(self) -> int:
        """Until it has ended and everything it said was shown; the exit code, 128+n for signal n."""
        for reader in self._readers:
            reader.join()
        code = self._process.wait()
        self.hang_up()
        return code if code >= 0 else 128 - code

    def _send(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was hung up on: wait() tells
            while data:  # past Python's buffer, which a signal handler must not enter twice
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
        """stderr: until the launcher runs, what ssh and the shell say is kept for the case that it never does."""
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
