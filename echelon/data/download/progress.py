"""Prints the progress of a download every few seconds."""

from __future__ import annotations

import threading
import time

from echelon.base.formatting import size

EVERY = 5.0


class Progress:
    """Counts files and bytes from many threads; prints if ``aloud``."""

    def __init__(self, files: int, aloud: bool) -> None:
        self._files, self._aloud = files, aloud
        self._done = self._bytes = self._told = 0
        self._since = self._last = time.monotonic()
        self._lock = threading.Lock()

    def came(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            if now - self._last < EVERY:
                return
            speed, self._told = (self._bytes - self._told) / (now - self._last), self._bytes
            self._last = now
        self._say(f"{self._done} of {self._files} files, {size(self._bytes)}, {speed / 1e6:.1f} MB/s")

    def finished_one(self) -> None:
        with self._lock:
            self._done += 1

    def end(self) -> None:
        """Print the total, if anything was downloaded."""
        if self._bytes:
            seconds = max(time.monotonic() - self._since, 1e-9)
            speed = f"{self._bytes / seconds / 1e6:.1f} MB/s"
            self._say(f"{self._files} files are here, {size(self._bytes)} fetched in {seconds:.1f} s ({speed})")

    def _say(self, text: str) -> None:
        if self._aloud:
            print(f"echelon: {text}", flush=True)
