"""One-line messages for errors of the operating system, with a remedy."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from echelon.base.errors import CheckpointError, Damaged

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def cannot_write(path: Path, error: OSError, opened_elsewhere: bool = False) -> str:
    """Return a message for a failed write.

    opened_elsewhere:  another rank created the directory, so its absence here means a different file system
    """
    reason = error.strerror or str(error)
    if opened_elsewhere and error.errno == errno.ENOENT:
        return (
            f"cannot write {path}: rank 0 created it, but this host does not see it; choose a directory that all "
            "hosts share"
        )
    return f"cannot write {error.filename or path}: {reason}; {_remedy(error)}"


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    lost = error.errno in (errno.ENOENT, errno.EIO)
    advice = "the checkpoint is incomplete, use another one" if lost else "check the path"
    return (Damaged if lost else CheckpointError)(f"cannot read {path}: {error.strerror or error}; {advice}")


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading. Raises ``CheckpointError`` for a link or a pipe in its place."""
    return os.fdopen(open_regular_handle(path), "rb")


def open_regular_handle(path: Path) -> int:
    """Open a file as ``open_regular`` does, and return its file descriptor."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_regular(path, "a symbolic link") from None
        raise cannot_read(path, error) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path, "no regular file")
    return handle


def _not_regular(path: Path, kind: str) -> CheckpointError:
    return CheckpointError(f"{path} is {kind}, which a checkpoint does not contain; copy the file itself there")


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "free some space there, or choose another directory"
    if error.errno in _FORBIDDEN:
        return "choose a directory that this process may write to"
    return "choose another directory"
