"""Remembers verified files by size and modification time, so that a second call need not read a terabyte again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from echelon.data.download.spec import RemoteFile


class VerifiedFiles:
    """A file with one line per verified file. Lines that are invalid or out of date are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._known: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._hear()

    def is_verified(self, file: RemoteFile, target: Path) -> bool:
        """Return True if the file in place is the one that was verified, and still matches the spec."""
        known = self._known.get(file.name)
        return known is not None and target.is_file() and known == _facts(file, target)

    def learn(self, file: RemoteFile, target: Path) -> bool:
        """Return True if the file in place matches the spec, as far as that is known without a request; remember it."""
        if not target.is_file() or (file.size is not None and target.stat().st_size != file.size):
            return False
        self._hear()  # another process may have downloaded it while this one waited for the lock
        if self.is_verified(file, target):
            return True
        good = digest(target, file.checksum[0]) == file.checksum[1] if file.checksum else file.size is not None
        if good:
            self.add(file, target)
        return good

    def add(self, file: RemoteFile, target: Path) -> None:
        line = json.dumps([file.name, *_facts(file, target)]) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line.encode())  # in one write, because other processes append too
        finally:
            os.close(handle)

    def _hear(self) -> None:
        """Read the lines that this or other processes have appended since the last call."""
        with self._lock, contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_to)
            for line in file:
                self._read_to += len(line)
                with contextlib.suppress(ValueError, TypeError):
                    name, *facts = json.loads(line)
                    self._known[name] = facts


def digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _facts(file: RemoteFile, target: Path) -> list[Any]:
    found = target.stat()
    wanted = ":".join(file.checksum) if file.checksum else file.url.split("?", 1)[0]
    return [found.st_size, found.st_mtime_ns, wanted]
