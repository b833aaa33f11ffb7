"""Unpacks the archives of a spec with ``unpack: true`` into their folder, once."""

from __future__ import annotations

import fcntl
import hashlib
import tarfile
from pathlib import Path

from echelon.base.errors import DataError, one_line
from echelon.data.download.spec import WORKINGS

ARCHIVE = ".tar"
TURN = "unpacking.lock"


def unpack(folder: Path, name: str) -> None:
    """Unpack one archive of ``folder`` into it, unless this version of it has been unpacked.

    Threads and processes take turns: archives may contain the same folders; tarfile fails if a folder appears while it
    creates it. Nothing can be written outside of the folder: tarfile's "data" filter refuses such names and links,
    devices, and setuid programs.
    """
    archive = folder / name
    known = archive.stat()
    version = f"{known.st_size} {known.st_mtime_ns}"
    note = folder / WORKINGS / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.unpacked"
    with (folder / WORKINGS / TURN).open("a") as turn, note.open("a+") as handle:
        fcntl.flock(turn, fcntl.LOCK_EX)
        handle.seek(0)
        if handle.read() == version:
            return
        handle.truncate(0)
        _extract(archive, folder)
        handle.write(version)


def _extract(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as opened:
            members = opened.getmembers()
            if any(Path(member.name).parts[:1] == (WORKINGS,) for member in members):
                raise DataError(f"{archive} holds '{WORKINGS}', where downloads are kept count of; rename it there")
            opened.extractall(folder, members, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive} cannot be unpacked: {one_line(error)}; is it a whole tar file?") from None
