"""The ledger of a stream of partitions: which ones were taken, in which order, with which files.

One process of the job, the leader, appends to it; all others follow it, and so does a resumed run. So every rank reads
the same files in the same order, whenever it looks at the directory. A late partition is taken late, not lost.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import IO, Any, NamedTuple

from echelon.base.errors import DataError


class Partition(NamedTuple):
    """One line: a partition with its files; or an end: why and when a job waited no longer."""

    name: str
    files: tuple[str, ...]
    end: str = ""
    job: str = ""
    time: float = 0.0


class PartitionLedger:
    """The lines of a ledger file.

    path: the file
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lines: list[Partition] = []
        self._read = 0
        self._file: IO[bytes] | None = None  # locked as long as it is open

    def lead(self) -> None:
        """Take the file for appending; remove a line that a killed process has left incomplete."""
        if self._file is not None:
            return
        try:
            file = open(self.path, "ab+", buffering=0)  # noqa: SIM115  it stays open
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}; give PartitionStream a ledger= of its own"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise DataError(
                f"another run appends to {self.path}; give this one a ledger= of its own, or end the other"
            ) from None
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        self._file = file

    def release(self) -> None:
        """Let another run append."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, lines: list[Partition]) -> None:
        assert self._file is not None
        self._file.write("".join(json.dumps(line._asdict()) + "\n" for line in lines).encode())
        os.fsync(self._file)

    def lines(self) -> list[Partition]:
        """Return all lines that are complete."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._lines += [self._parsed(line) for line in whole.splitlines()]
        self._read += len(whole)
        return self._lines

    def _parsed(self, line: bytes) -> Partition:
        try:
            found: dict[str, Any] = json.loads(line)
            files = tuple(map(str, found["files"]))
            return Partition(str(found["name"]), files, str(found["end"]), str(found["job"]), float(found["time"]))
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{self.path} has a line that is no partition: {line[:60]!r}; restore the file") from None
