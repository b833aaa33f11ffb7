"""The journal: every change of a shard, in the order in which it was applied, in segment files.

A segment ``journal-00000012.seg`` holds records without gaps, LSN after LSN. A process that is killed while it writes
leaves a torn last record: its request was never answered, so the record is cut off. Any other inconsistency is an
error. Without ``fsync`` a record survives the end of the process, but not a power cut of the host.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError
from echelon.checkpoint.directory import sync_directory
from echelon.checkpoint.os_errors import cannot_read, cannot_write
from echelon.parameter_server.persistence.file_record import MessageRecord, TornRecord, only_zeros, read, write_all

_NAME = re.compile(r"journal-(\d{8,12})\.seg")


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"journal-{number:08d}.seg"


def segments(directory: Path) -> dict[int, Path]:
    """Return the segments in a directory by number, in ascending order."""
    numbers = {path: segment_number(path.name) for path in directory.iterdir()}
    return dict(sorted((number, path) for path, number in numbers.items() if number is not None))


def segment_number(name: str) -> int | None:
    """Return the number in a segment's name; None for any other file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class JournalSegment:
    """One segment that is being written. It is not thread-safe: a shard appends under its apply lock."""

    def __init__(self, directory: Path, number: int, *, fsync: bool = False) -> None:
        self.number, self.path, self.size = number, segment_path(directory, number), 0
        self._fsync, self._torn = fsync, False
        try:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            if fsync:
                sync_directory(directory)
        except OSError as error:
            raise CheckpointError(cannot_write(self.path, error)) from None

    def append(self, buffers: list[Any]) -> None:
        """Write a complete record, or leave the file unchanged and raise ``CheckpointError``."""
        if self._torn:  # a record after a torn one could not be read
            raise CheckpointError(f"{self.path} ends in a torn record; nothing can be written after it")
        try:
            written = write_all(self._handle, buffers)
            if self._fsync:
                os.fdatasync(self._handle)
        except BaseException as error:
            self._undo()
            if isinstance(error, OSError):
                raise CheckpointError(cannot_write(self.path, error)) from None
            raise
        self.size += written

    def _undo(self) -> None:
        try:
            os.ftruncate(self._handle, self.size)
        except OSError:
            self._torn = True

    def close(self) -> None:
        os.close(self._handle)


def replay(directory: Path, first: int, after: int, only_first: bool = False) -> Iterator[MessageRecord]:
    """Yield the records after LSN ``after``, from segment ``first`` on. A torn tail of the last segment is cut off."""
    found = [number for number in segments(directory) if number == first or (number > first and not only_first)]
    if not found:
        raise CheckpointError(
            f"{segment_path(directory, first)} is missing, with all changes since the last snapshot; restore it from a "
            "copy, or remove the directory and load an earlier checkpoint"
        )
    if found != list(range(first, found[-1] + 1)):
        missing = next(number for number in range(first, found[-1]) if number not in found)
        raise CheckpointError(_gap(segment_path(directory, missing)))
    lsn: int | None = None
    for number in found:
        for record in _records(segment_path(directory, number), last=number == found[-1]):
            if record.lsn != (record.lsn if lsn is None else lsn + 1) or (lsn is None and record.lsn > after + 1):
                raise CheckpointError(_gap(segment_path(directory, number)))
            lsn = record.lsn
            if lsn > after:
                yield record


def sound_size(path: Path) -> int:
    """Return the number of bytes of a segment up to its first torn or damaged record."""
    handle = os.open(path, os.O_RDONLY)
    try:
        offset, size = 0, os.fstat(handle).st_size
        with suppress(TornRecord, CheckpointError):
            while offset < size:
                offset = read(handle, path, offset, size).end
        return offset
    finally:
        os.close(handle)


def _records(path: Path, last: bool) -> Iterator[MessageRecord]:
    try:
        handle = os.open(path, os.O_RDWR if last else os.O_RDONLY)
    except OSError as error:
        raise cannot_read(path, error) from None
    try:
        offset, size = 0, os.fstat(handle).st_size
        while offset < size:
            try:
                record = read(handle, path, offset, size)
            except (TornRecord, CheckpointError) as error:
                _cut(handle, path, offset, size, last, error)
                return
            offset = record.end
            yield record
    finally:
        os.close(handle)


def _cut(handle: int, path: Path, offset: int, size: int, last: bool, why: Exception) -> None:
    """Cut a torn tail off and print a notice. Raises ``CheckpointError`` for any other damage."""
    if not last or not (isinstance(why, TornRecord) or only_zeros(handle, offset, size)):
        if isinstance(why, CheckpointError):
            raise why from None
        raise CheckpointError(f"{path} is truncated at byte {size}; restore the file from a copy")
    os.ftruncate(handle, offset)
    print(
        f"echelon: {path.name} ended inside a record that was never answered; its last {size - offset} bytes are cut",
        file=sys.stderr,
        flush=True,
    )


def _gap(path: Path) -> str:
    return f"{path} does not go on where the records before it end; restore the missing segments from a copy"
