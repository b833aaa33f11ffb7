"""Checks of the checkpoint directory: free space, speed, and visibility from all hosts."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from echelon.tools.doctor.host_details import Details

_PIECE = 2**22
#: Bytes written and read back, and number of small writes with fsync.
_WHOLE, _SYNCS = 2**26, 12


def room(directory: Path) -> Details:
    """Return the free bytes and inodes. Raises ``OSError`` if a test file cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    with _scratch(directory) as path:
        path.write_bytes(b"here")
    result = os.statvfs(directory)
    return {
        "free": result.f_bavail * result.f_frsize,
        "size": result.f_blocks * result.f_frsize,
        "inodes": result.f_files,
        "free_inodes": result.f_favail,
    }


def speeds(directory: Path) -> Details:
    """Measure bytes/s of writing with a final fsync and of reading past the cache, and seconds of a small fsync."""
    with _scratch(directory) as path:
        start = time.perf_counter()
        _write(path)
        written = time.perf_counter() - start
        start = time.perf_counter()
        _read(path)
        read = time.perf_counter() - start
    with _scratch(directory) as path:
        syncs = _sync_times(path)
    return {"write": _WHOLE / written, "read": _WHOLE / read, "fsync": statistics.median(syncs)}


def leave_mark(directory: Path, name: str) -> Details:
    return {"bytes": (directory / name).write_text(name, encoding="utf-8")}


def remove_mark(directory: Path, name: str) -> Details:
    (directory / name).unlink(missing_ok=True)
    return {}


def sees_mark(directory: Path, name: str, seconds: float) -> bool:
    """Return True if the file of another host appears within ``seconds``; network file systems may show it late."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.scandir(directory).close()  # NFS revalidates its cache when the directory is opened
            if (directory / name).read_text(encoding="utf-8") == name:
                return True
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    path = directory / f".echelon-doctor-{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path) -> None:
    piece = os.urandom(_PIECE)  # some file systems compress zeros
    with path.open("wb", buffering=0) as file:
        for _ in range(_WHOLE // _PIECE):
            file.write(piece)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(_PIECE):
            pass


def _sync_times(path: Path) -> list[float]:
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            start = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return times
