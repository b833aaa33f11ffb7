"""A lock on a directory: one process at a time uses it, and a second one learns which process has the lock.

The lock is a ``flock`` on a file in the directory, which names host and process. The kernel releases it when the
process ends for any reason, so a killed job does not block the next one. On a file system without locks a lease keeps
a second process out (``directory_lease``), or a line is logged. A process that has counted as lost finds another token
in the file: ``lost_to``.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echelon.base.directory_lease import EXPIRY, DirectoryLease

#: Seconds to wait for the holder to end: it may have been stopped or killed a moment ago.
PATIENCE = 5.0
#: The same for a restarted job: a file server needs up to 90 s to notice that a host is lost.
PATIENCE_AFTER_RESTART = 120.0
_LOOK = 0.1  # seconds


@dataclass(frozen=True)
class LockUse:
    """A kind of lock.

    file:       name of the locked file in the directory
    component:  name of the component in log lines
    doing:      what the holder does in the directory, and what another process can do instead
    leased:     use a lease on file systems without locks; default False: log a line
    """

    file: str
    component: str
    doing: str
    leased: bool = False


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
    handle: int | None  # None: a lease alone
    lease: DirectoryLease
    count: int = 1


_held: dict[tuple[str, str], _HeldLock] = {}  # by directory and file: users in one process share a lock


def claim(
    directory: Path, use: LockUse, restarted: bool, say: Callable[[str], None], patience: float | None = None
) -> str | None:
    """Lock ``directory`` for this process; return None, or the reason for a refusal. ``release`` unlocks it.

    restarted:  the job has been restarted, so its own process on a lost host may still hold the lock
    patience:   seconds to wait for the holder to end; default: 5, or 120 if the job has been restarted
    """
    key, here = _key(directory, use), socket.gethostname()
    if key in _held:
        _held[key].count += 1
        return None
    usual = PATIENCE_AFTER_RESTART if restarted else PATIENCE
    until = time.monotonic() + (usual if patience is None else patience)
    lease = DirectoryLease(directory / use.file, here, os.getpid())
    try:
        while (handle := _locked(directory, use, lease)) is None:
            holder = read_holder(directory, use)
            if holder == LockHolder(here, os.getppid()):
                return None  # a process and its forked children are one job
            if time.monotonic() > until:
                return _refusal(directory, use, lease, restarted and holder.host != here, say)
            time.sleep(_LOOK)
    except NoLocksError as error:
        return _claim_lease(directory, use, lease, restarted, say, until, error)
    except OSError:
        pass  # the first write reports what is wrong with the directory
    else:
        _held[key] = _HeldLock(handle, lease)
    return None


def _claim_lease(
    directory: Path,
    use: LockUse,
    lease: DirectoryLease,
    restarted: bool,
    say: Callable[[str], None],
    until: float,
    error: NoLocksError,
) -> str | None:
    """Keep other processes out by a lease; return None, or the reason for a refusal."""
    missing = f"{use.component}: {directory} does not support file locks ({error})"
    if not use.leased:
        say(f"{missing}; a second job that writes there is not detected")
        return None
    say(f"{missing}; a lease in {use.file} keeps other jobs out (one that was killed keeps it for {EXPIRY:g} s)")
    here = socket.gethostname()
    try:
        while lease.is_taken() or not lease.take():
            holder = read_holder(directory, use)
            if holder == LockHolder(here, os.getppid()):
                return None
            if time.monotonic() > until:
                return _refusal(directory, use, lease, restarted and holder.host != here, say)
    except OSError:
        return None
    _held[_key(directory, use)] = _HeldLock(None, lease)
    return None


def _refusal(
    directory: Path, use: LockUse, lease: DirectoryLease, is_own: bool, say: Callable[[str], None]
) -> str | None:
    holder = read_holder(directory, use)
    if is_own:
        say(
            f"{use.component}: {holder}, of an earlier round of this job, still holds the lock of {directory}; that "
            "process counts as lost"
        )
        lease.write_over()
        _held[_key(directory, use)] = _HeldLock(None, lease)
        return None
    return f"{directory}: {holder} {use.doing}"


def has_lock(directory: Path, use: LockUse) -> bool:
    """Return True if this process holds a lock of the file system, and not only a lease or nothing."""
    held = _held.get(_key(directory, use))
    return held is not None and held.handle is not None


def lost_to(directory: Path, use: LockUse) -> str | None:
    """Return the reason if this process has lost ``directory`` to another one; None if not, or if it had no claim."""
    held = _held.get(_key(directory, use))
    if held is None or not held.lease.is_lost():
        return None
    return (
        f"{directory}: {read_holder(directory, use)} has taken over from this process, which counted as lost; nothing "
        "more is written there by this job"
    )


def release(directory: Path, use: LockUse) -> None:
    """Release a lock, and remove its file."""
    _release(_key(directory, use))


def _release(key: tuple[str, str]) -> None:
    held = _held.get(key)
    if held is None:
        return
    held.count -= 1
    if not held.count:
        del _held[key]
        held.lease.release()
        if held.handle is not None:
            os.close(held.handle)


def read_holder(directory: Path, use: LockUse) -> LockHolder:
    """Return the process that last locked ``directory``."""
    try:
        known = json.loads((directory / use.file).read_text())
        return LockHolder(str(known["host"]), int(known["pid"]))
    except (OSError, ValueError, TypeError, KeyError):
        return LockHolder("", 0)


def _key(directory: Path, use: LockUse) -> tuple[str, str]:
    return os.path.realpath(directory), use.file


def _locked(directory: Path, use: LockUse, lease: DirectoryLease) -> int | None:
    """Lock the file and write this process into it; return None if another process has the lock."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / use.file
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _lock(handle) or not _is_there(path, handle):  # the last holder may have just removed the file
            os.close(handle)
            return None
        os.ftruncate(handle, 0)
        os.pwrite(handle, lease.content(), 0)
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
        _release(key)


def _forget() -> None:
    """Close the handles in a forked process: the locks belong to its parent."""
    for held in _held.values():
        if held.handle is not None:
            os.close(held.handle)
    _held.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget)
