"""Keeps compiled programs with the run, so that a restart, on another machine too, compiles nothing again.

Torch's own cache lies in the temporary directory of one machine. Its files are code, and pickles: a directory is used
only if this user made it here. It notes its inode, which a copy or an unpacked archive does not have.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import torch

#: Variable that names torch's cache; a value of the user's stays.
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
FOLDER, ORIGIN = "compiled", "origin"


def keep_programs(directory: Path | None, device: torch.device) -> str | None:
    """Let torch keep compiled programs under ``directory``; return a line if another place is used instead.

    Call this before anything is compiled. Torch checks code, options and shapes of each program; the name of the folder
    stands for all that lies outside of them: versions, processor and GPU.

    directory: directory that the run keeps over restarts; None leaves torch's own place
    """
    if directory is None or VARIABLE in os.environ:
        return None
    folder = directory.absolute() / FOLDER / _key(device)
    try:
        if not folder.exists():
            _make(folder)
        foreign = _why_foreign(folder)
    except OSError as error:
        foreign = f"cannot be written ({error.strerror or error})"
    if foreign is not None:
        return f"fast: compiled programs are not kept: {folder} {foreign}; remove it to have them kept"
    os.environ[VARIABLE] = str(folder)
    return None


def _key(device: torch.device) -> str:
    """Return a name for what compiled programs run on."""
    parts = [torch.__version__, str(torch.version.git_version), sys.version, platform.machine(), _processor()]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's instruction sets, which compiled code uses."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _make(folder: Path) -> None:
    """Make the folder with its note; of several ranks, one succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # for this user only
    (made / ORIGIN).write_text(str(made.stat().st_ino))
    try:
        made.rename(folder)
    except OSError:
        shutil.rmtree(made)
        if not folder.exists():
            raise


def _why_foreign(folder: Path) -> str | None:
    """Return why the folder's programs must not run here; None if this user made it in this place."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return "is open to other users"
    try:
        inode = (folder / ORIGIN).read_text()
    except OSError:
        inode = ""
    return None if inode == str(found.st_ino) else "was copied from elsewhere, and may hold code of others"
