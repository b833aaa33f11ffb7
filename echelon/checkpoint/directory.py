"""The directory of checkpoints, in which each one appears and disappears as a whole.

    DIR/step-00000120/                    complete, because it has this name
    DIR/.step-00000130-5f1c09aa.writing/  being written, or left over from a killed save
    DIR/.step-00000110.removed/           being removed
    DIR/.step-00000120.replaced/          the earlier one of the same step, while its successor takes the name

Only renames change which checkpoints are complete, so a kill at any moment leaves the state before or after a rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
from pathlib import Path

from echelon.base.errors import CheckpointError

INDEX = "index.json"
#: Directories that saves of this process are writing. Another engine of the process must not sweep them.
under_way: set[Path] = set()
_renaming = threading.RLock()  # saves of several engines run in threads, and rename in the same directory
_COMPLETE = re.compile(r"step-(\d{1,18})")
_ASIDE = re.compile(r"\.step-(\d{1,18})(?:-[0-9a-f]{8})?\.(writing|removed|replaced)")


def final_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def aside_path(directory: Path, step: int, why: str) -> Path:
    return directory / f".step-{step:08d}.{why}"


def writing_path(directory: Path, step: int) -> Path:
    """Return a unique name: without file locks, two jobs must still not write into the same directory."""
    return directory / f".step-{step:08d}-{secrets.token_hex(4)}.writing"


def tensor_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of the highest step in ``directory``; ``None`` if there is none."""
    found = complete(Path(directory))
    return found[max(found)] if found else None


def find(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` itself if it is a checkpoint, else the newest one inside it."""
    given = Path(path)
    if (given / INDEX).is_file() or (_COMPLETE.fullmatch(given.name) and given.is_dir()):
        return given
    newest = latest(given)
    if newest is not None:
        return newest
    if not given.exists():
        raise CheckpointError(f"no checkpoint at {given}: there is no such directory; check the path")
    what = "a directory with step-* directories in it" if given.is_dir() else "a directory, but this is a file"
    raise CheckpointError(f"no complete checkpoint at {given}: looked for {INDEX} or {what}; check the path")


def complete(directory: Path) -> dict[int, Path]:
    """Return complete checkpoints by step. One that was moved aside counts if its successor never took the name."""
    found, replaced = {}, {}
    for path in _entries(directory):
        if match := _COMPLETE.fullmatch(path.name):
            found[int(match[1])] = path
        elif (match := _ASIDE.fullmatch(path.name)) and match[2] == "replaced":
            replaced[int(match[1])] = path
    return replaced | found


def open_aside(directory: Path, aside: Path) -> None:
    """Remove leftovers of interrupted writes, and create ``aside``, an empty directory to write into."""
    if not directory.is_dir():
        directory.mkdir(parents=True)
        sync_directory(directory.parent)
    with _renaming:
        sweep(directory)
        under_way.add(aside)
        aside.mkdir()


def publish(aside: Path, directory: Path, step: int) -> Path:
    """Rename the finished ``aside`` to its final name."""
    sync_directory(aside)
    final, replaced = final_path(directory, step), aside_path(directory, step, "replaced")
    with _renaming:
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        sync_directory(directory)
        if replaced.exists():
            remove_tree(replaced)
    return final


def prune(directory: Path, step: int, keep: int) -> None:
    """Remove the oldest checkpoints up to ``step`` beyond ``keep``; later steps may belong to another run.

    keep: 0 removes all but ``step``, later ones too
    """
    with _renaming:
        steps = sorted(old for old in complete(directory) if old <= step)
        for old in steps[:-keep] if keep else complete(directory).keys() - {step}:
            removed = aside_path(directory, old, "removed")
            complete(directory)[old].rename(removed)
            sync_directory(directory)
            remove_tree(removed)


def sweep(directory: Path) -> None:
    """Remove leftovers of interrupted writes and removals; give a replaced one without a successor its name back."""
    for path in _entries(directory):
        if (match := _ASIDE.fullmatch(path.name)) and path not in under_way:
            final = final_path(directory, int(match[1]))
            if match[2] == "replaced" and not final.exists():
                path.rename(final)
            else:
                _clear(path, aside_path(directory, int(match[1]), "removed"))


def _clear(path: Path, removed: Path) -> None:
    """Remove a leftover after renaming it, so that another job that still writes it cannot publish half of it."""
    with contextlib.suppress(FileNotFoundError):
        if path != removed:
            if removed.exists():
                remove_tree(removed)
            path.rename(removed)
        remove_tree(removed)


def remove_tree(path: Path) -> None:
    shutil.rmtree(path)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` survive a power cut; some network file systems neither have nor need this call."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _entries(directory: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}; check its permissions") from None
