"""``ManagedProcess``: one server or worker of a job with parameter servers, its exit and its restarts."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.base.environment import RESTARTS
from echelon.launcher.failure import STANDSTILL, Failure, read_record


@dataclass
class ManagedProcess:
    """One server or worker, over all its restarts."""

    role: str
    index: int
    count: int
    host: str
    command: Sequence[str]
    env: dict[str, str]
    log: Path
    record: Path
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    #: why the launcher killed it, '' if it did not
    _gave_up: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def exit_code(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def session(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        self.record.unlink(missing_ok=True)
        self._gave_up = ""
        self._process = subprocess.Popen(
            self.command,
            env=os.environ | self.env | {RESTARTS: str(self.restarts), "TORCHELASTIC_ERROR_FILE": str(self.record)},
            stdin=subprocess.DEVNULL if self.role == "server" else None,
            start_new_session=True,
        )

    def ask_to_end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def give_up(self, why: str) -> None:
        """Kill it with SIGKILL, because a stopped process handles no other signal."""
        assert self._process is not None
        self._gave_up = why
        self._process.kill()

    def failure(self) -> Failure:
        code = self.exit_code
        assert code
        return Failure(
            rank=self.index,
            world_size=self.count,
            host=self.host,
            pid=self.session,
            exit_code=code,
            log=str(self.log),
            role=self.role,
            **self._last_words(),
        )

    def _last_words(self) -> dict[str, Any]:
        if self._gave_up:
            return {"kind": STANDSTILL, "message": self._gave_up, "time": time.time()}
        return read_record(self.record)


def await_end(members: Sequence[ManagedProcess], seconds: float, interval: float) -> None:
    """Wait until all started processes have ended, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(member.session and member.exit_code is None for member in members) and time.monotonic() < deadline:
        time.sleep(interval)
