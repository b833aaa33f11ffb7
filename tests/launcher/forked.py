"""The ``echelon`` command as a process that is forked with torch imported already: a fresh start takes 2 s of a core.

It differs from a fresh one in nothing but how it came to be, and in its command line as others see it in /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from harness import context
from warm import fork_ranks


class Forked:
    """``echelon WORDS...`` in a session of its own; to its user it is a ``subprocess.Popen``."""

    def __init__(self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], warm: bool = False) -> None:
        self.args = ["echelon", *words]
        (out, its_out), (err, its_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        # a daemon: it ends with the tests, whatever becomes of them
        self._process = context.Process(
            target=_become, args=(list(words), str(cwd), dict(env), warm, its_out, its_err), daemon=True
        )
        self._process.start()
        its_out.close()
        its_err.close()
        self.stdout, self.stderr = _text(out), _text(err)
        self._readers: list[_Reader] = []

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read the rest of the output, and wait for the end. It may be called again after a TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        self._readers = self._readers or [_Reader(self.stdout), _Reader(self.stderr)]
        for reader in self._readers:
            reader.join(_left(until))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(_left(until))
        out, err = self._readers
        return out.text, err.text

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Reader(threading.Thread):
    """Reads a stream to its end, and closes it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(daemon=True)
        self.text, self._stream = "", stream
        self.start()

    def run(self) -> None:
        if not self._stream.closed:
            with self._stream:
                self.text = self._stream.read()


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _text(pipe: Connection) -> TextIO:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()))


def _become(words: list[str], cwd: str, env: dict[str, str], warm: bool, out: Connection, err: Connection) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run in the background
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["echelon", *words]
    sys.path.insert(0, cwd)  # as "python -m" has it
    if warm:
        fork_ranks()
    from echelon.cli import main

    main()
