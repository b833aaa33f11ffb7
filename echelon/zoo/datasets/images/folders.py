"""Find the folder of a data set and check it before it is read."""

from __future__ import annotations

from pathlib import Path

from echelon.base.errors import DataError
from echelon.zoo.entry import Request

UNFINISHED = (".part", ".partial", ".crdownload", ".tmp", ".download")  #: file name endings of incomplete downloads


def folder_of(request: Request, what: str) -> Path:
    """Return ``--dataset_dir``; raise DataError if it is no folder, is empty or has incomplete downloads."""
    name = request.get("dataset_dir")
    if name is None:
        raise DataError(f"{what} is read from a folder, and none was given; say where it is with --dataset_dir")
    folder = Path(name).expanduser()
    if not folder.exists():
        raise DataError(f"{what}: there is no folder {folder}; check --dataset_dir")
    if not folder.is_dir():
        raise DataError(f"{what}: {folder} is a file; --dataset_dir takes the folder it is in")
    entries = sorted(entry.name for entry in folder.iterdir())
    if not entries:
        raise DataError(f"{what}: the folder {folder} is empty; put the files there, or check --dataset_dir")
    refuse_unfinished(folder, entries)
    return folder


def refuse_unfinished(folder: Path, names: list[str]) -> None:
    for name in names:
        if name.endswith(UNFINISHED):
            raise DataError(f"{folder / name} was not fetched to its end; fetch it again, or remove it")
