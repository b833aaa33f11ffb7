"""Kills the ranks of a launcher that was itself killed: a small process that outlives the launcher.

It is started by its path and imports nothing of Echelon. It reads from a pipe which sessions belong to the job (each
rank leads one); if the pipe breaks without a farewell, it kills all processes of these sessions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType

FAREWELL = "farewell"


def processes_of(sessions: Iterable[int]) -> list[int]:
    """Return the living processes of these sessions: ranks, their children, and orphaned children."""
    wanted, result = set(sessions), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                # after the command in parentheses: state, parent, group, session
                state, _, _, session = stat.read().rpartition(")")[2].split()[:4]
                if int(session) in wanted and state not in "ZX":
                    result.append(int(name))
    return result


def end_sessions(sessions: Iterable[int]) -> None:
    """Kill every process of these sessions and wait until none is left, at most 5 seconds."""
    wanted, deadline = set(sessions), time.monotonic() + 5.0
    while wanted and (left := processes_of(wanted)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class OrphanReaper:
    """The launcher's end of the pipe to the reaper process."""

    def __init__(self, records: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, records],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C at the terminal does not reach it
            text=True,
        )

    def watch(self, sessions: Iterable[int]) -> None:
        self._send(" ".join(str(session) for session in sessions))

    def __enter__(self) -> OrphanReaper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(FAREWELL)
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the job continues without its reaper
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def main() -> None:
    sessions: list[int] = []
    for line in sys.stdin:
        if line.strip() == FAREWELL:
            return
        sessions = [int(part) for part in line.split()]
    end_sessions(sessions)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
