"""A lock on a checkpoint directory: one job at a time writes there, and a second one learns which process has the lock.

The lock is a ``flock`` on ``DIR/.writer``, which names host and process. The kernel releases it when the process ends
for any reason, so a killed job does not block the next one. Readers do not take it. On a file system without locks a
line is logged and training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from echelon.base.environment import RESTART_COUNT
from echelon.base.errors import CheckpointError
from echelon.distributed.collectives import gather_json

FILE = ".writer"
#: Seconds to wait for the holder to end: it may have been stopped or killed a moment ago.
PATIENCE = 5.0
#: The same for a restarted job: a file server needs up to 90 s to notice that a host is lost.
PATIENCE_AFTER_RESTART = 120.0
_LOOK = 0.1  # seconds


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock; pid 0 if it is not known."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}" if self.pid else "another process"


class NoLocksError(Exception):
    """The file system has no locks."""


@dataclass
class _HeldLock:
    handle: int
    count: int


_held: dict[str, _HeldLock] = {}  # by directory: engines of one process share a lock


class DirectoryLocks:
    """The directories that an engine writes into. All ranks call together; the rank that ``writes`` holds the locks."""

    def __init__(self, group: dist.ProcessGroup | None, writes: bool, say: Callable[[str], None]) -> None:
        self._group, self._writes, self._say = group, writes, say
        self._taken: set[Path] = set()

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, directory: Path) -> None:
        """Lock ``directory`` against other jobs; raise ``CheckpointError`` on all ranks if another job has the lock."""
        if directory in self._taken:
            return
        restarted = os.environ.get(RESTART_COUNT, "0") != "0"
        refused = claim(directory, restarted, self._say) if self._writes else None
        if self._group is not None:
            refused = next(filter(None, gather_json(refused, self._group)), None)
        if refused is not None:
            raise CheckpointError(refused)
        self._taken.add(directory)

    def release(self) -> None:
        for directory in self._taken if self._writes else ():
            release(directory)
        self._taken.clear()


def claim(directory: Path, restarted: bool, say: Callable[[str], None]) -> str | None:
    """Lock ``directory`` for this process; return None, or the reason for a refusal. ``release`` unlocks it.

    restarted:  the job has been restarted, so its own process on a lost host may still hold the lock
    """
    key, here = os.path.realpath(directory), socket.gethostname()
    if key in _held:
        _held[key].count += 1
        return None
    until = time.monotonic() + (PATIENCE_AFTER_RESTART if restarted else PATIENCE)
    try:
        while (handle := _locked(directory)) is None:
            holder = read_holder(directory)
            if holder == LockHolder(here, os.getppid()):
                return None  # a process and its forked children are one job
            if time.monotonic() > until:
                return _refusal(directory, holder, restarted and holder.host != here, say)
            time.sleep(_LOOK)
    except NoLocksError as error:
        say(
            f"checkpoint: {directory} does not support file locks ({error}); a second job that writes there is not "
            "detected"
        )
    except OSError:
        pass  # the first save reports what is wrong with the directory
    else:
        _held[key] = _HeldLock(handle, 1)
    return None


def _refusal(directory: Path, holder: LockHolder, is_own: bool, say: Callable[[str], None]) -> str | None:
    if is_own:
        say(
            f"checkpoint: {holder}, of an earlier round of this job, still holds the lock of {directory}; that "
            "process counts as lost"
        )
        return None
    return (
        f"{directory}: {holder} writes checkpoints there; end that job (in a notebook: engine.close()), or choose "
        "another directory"
    )


def release(directory: Path) -> None:
    """Release a lock, and remove its file."""
    key = os.path.realpath(directory)
    held = _held.get(key)
    if held is None:
        return
    held.count -= 1
    if not held.count:
        del _held[key]
        with contextlib.suppress(OSError):
            Path(key, FILE).unlink()
        os.close(held.handle)


def read_holder(directory: Path) -> LockHolder:
    """Return the process that last locked ``directory``."""
    try:
        known = json.loads((directory / FILE).read_text())
        return LockHolder(str(known["host"]), int(known["pid"]))
    except (OSError, ValueError, TypeError, KeyError):
        return LockHolder("", 0)


def _locked(directory: Path) -> int | None:
    """Lock the file and write this process into it; return None if another process has the lock."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _lock(handle) or not _is_there(path, handle):  # the last holder may have just removed the file
            os.close(handle)
            return None
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocksError(error.strerror) from None
    return True


def _is_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _release_all() -> None:
    for key in list(_held):
        _held[key].count = 1
        release(Path(key))


def _forget() -> None:
    """Close the handles in a forked process: the locks belong to its parent."""
    for held in _held.values():
        os.close(held.handle)
    _held.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget)
