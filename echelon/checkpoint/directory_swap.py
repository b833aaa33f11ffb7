"""Puts a finished directory in the place of a former one in a single step, so that a kill leaves one of them whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from echelon.checkpoint.directory import remove_tree, sync_directory

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_HASH = r"[0-9a-f]{8}"


def staging_path(target: Path) -> Path:
    """Return a unique path beside ``target`` to write its successor to."""
    return target.with_name(f".{target.name}-{secrets.token_hex(4)}.writing")


def sweep_leftovers(target: Path) -> None:
    """Remove what killed saves of ``target`` left beside it; give a former directory without a successor its name back.

    A directory that was moved aside is complete, so it takes the name again if that is free.
    """
    leftover = re.compile(rf"\.{re.escape(target.name)}-{_HASH}\.(writing|replaced)")
    for path in sorted(target.parent.iterdir()):
        if (match := leftover.fullmatch(path.name)) and path.is_dir():
            if match[1] == "replaced" and not target.exists():
                path.rename(target)
            else:
                remove_tree(path)


def keep_others(former: Path, staged: Path, is_replaced: Callable[[str], bool]) -> None:
    """Take over what lies in the former directory and is not written anew, by links where the file system has them.

    is_replaced: returns True for the name of a file that belongs to the former weights
    """
    for path in former.iterdir():
        if is_replaced(path.name) or (staged / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staged / path.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(path), str(staged / path.name))


def swap_in(staged: Path, target: Path) -> None:
    """Give ``staged`` the name of ``target``, and remove what had it.

    The kernel exchanges the two names. On file systems that cannot, two renames follow each other: a kill between them
    leaves the former directory beside its name, where the next save finds it.
    """
    sync_directory(staged)
    if not target.exists():
        staged.rename(target)
    elif _exchange(staged, target):
        remove_tree(staged)
    else:
        replaced = staged.with_suffix(".replaced")
        target.rename(replaced)
        staged.rename(target)
        remove_tree(replaced)
    sync_directory(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names; return False where the system or the file system has no such call."""
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        names = os.fsencode(first), os.fsencode(second)
        return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
    return False


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return target
