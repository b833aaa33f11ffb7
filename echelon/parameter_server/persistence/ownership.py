"""``DirectoryOwnership``: keeps two processes from keeping their state in one directory.

On one host, and on file systems with locks, a lock keeps the second process out. Where there are no locks, or where a
host that counts as lost still runs, the manifest's epoch fences the first process: a process that starts writes its
higher epoch before it reads anything, and the earlier one looks at the manifest before each record and snapshot, and
after each record before it is answered.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from echelon.base.console import say
from echelon.base.directory_lock import LockUse, claim, has_lock, release
from echelon.base.errors import CheckpointError
from echelon.parameter_server.persistence.restore import MANIFEST, Manifest


class DirectoryOwnership:
    """A process's claim to the directory of a server's state.

    epoch:  lowest epoch to take
    """

    def __init__(self, directory: Path, server: int, epoch: int) -> None:
        self.epoch = epoch
        self._directory, self._server = directory, server
        self._use = LockUse(
            ".lock", "ps", f"keeps the state of server {server} there; end it, or give this server another --state"
        )
        self._locked = False
        self.is_alone = False  #: a lock keeps other processes out; else only the epoch does
        self._seen: tuple[int, int] | None = None
        self._written: Manifest | None = None

    def lock(self) -> None:
        """Take the lock, or raise ``CheckpointError`` with the process that has it."""
        if (refused := claim(self._directory, self._use, False, say)) is not None:
            raise CheckpointError(refused)
        self._locked, self.is_alone = True, has_lock(self._directory, self._use)

    def take(self, manifest: Manifest | None) -> Manifest | None:
        """Take an epoch above the manifest's, and write it there; return the manifest."""
        self.epoch = max(self.epoch, 1 + (manifest.epoch if manifest is not None else 0))
        return None if manifest is None else self.write(manifest)

    def write(self, manifest: Manifest) -> Manifest:
        """Write a manifest with this process's epoch, and return it."""
        manifest = replace(manifest, epoch=self.epoch)
        manifest.write(self._directory)
        self._written = manifest
        self._seen = self._look()
        return manifest

    def lost(self) -> str | None:
        """Return the reason if another process has taken over; None if not. It takes 3 microseconds."""
        seen = self._look()
        if seen == self._seen or seen is None:
            return None
        manifest = Manifest.read(self._directory)
        if manifest is None or manifest.epoch <= self.epoch:
            if manifest is not None and manifest.epoch < self.epoch and self._written is not None:
                self.write(self._written)  # an earlier process has replaced it between its last look and its rename
            return None
        return (
            f"server {self._server} of epoch {self.epoch} has lost {self._directory} to a later process of it (epoch "
            f"{manifest.epoch}) and answers nothing more; end this process"
        )

    def release(self) -> None:
        if self._locked:
            self._locked = False
            release(self._directory, self._use)

    def _look(self) -> tuple[int, int] | None:
        with suppress(OSError):
            found = os.stat(self._directory / MANIFEST)
            return found.st_ino, found.st_mtime_ns
        return None
