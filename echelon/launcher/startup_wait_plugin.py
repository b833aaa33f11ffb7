"""``StartupWaitPlugin``: prints on the launcher's console which processes this host's processes wait for at startup.

Only rank 0 writes to the console. A rank, worker or server that waits leaves its line in a directory (wait_notice.py);
the launcher prints one line for each awaited process, even if several of its processes wait for it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from echelon.base.environment import WAIT_LINES
from echelon.launcher.agent_plugin import Round
from echelon.launcher.failure import Failure

#: Seconds after which a line about the same process is printed again, because it belongs to a later attempt.
AGAIN = 10.0


class StartupWaitPlugin:
    """A plugin for the ranks of this host, and for its servers and workers."""

    def __init__(self, records: Path, say: Callable[[str], None]) -> None:
        self._directory, self._say = records / "waits", say
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._announced: dict[str, float] = {}

    @property
    def announcement(self) -> Mapping[str, str]:
        return {}

    def environment(self, at: Round | None = None) -> dict[str, str]:
        return {WAIT_LINES: str(self._directory)}

    def begin(self, at: Round, pids: Mapping[int, int]) -> None: ...

    def poll(self) -> Failure | None:
        """Print the new lines."""
        for path in sorted(self._directory.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text())
                path.unlink()
                self._print(str(record["line"]), str(record["awaited"]))
        return None

    def _print(self, line: str, awaited: str) -> None:
        last, now = self._announced.get(awaited), time.monotonic()
        self._announced[awaited] = now
        if last is None or now - last > AGAIN:
            self._say(line)

    def end(self) -> None: ...

    def close(self) -> None: ...
