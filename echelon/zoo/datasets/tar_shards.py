"""The data set ``tar_shards``: images and labels in tar files, KEY.jpg beside KEY.cls, in the webdataset format.

Each tar is scanned once for the positions of its images; then any image is read with one seek. So samples are shuffled
globally, and a run can resume at any sample with any number of ranks.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.images.encoded import ImageCatalogue, Numbers, encoded, every_tenth
from echelon.zoo.datasets.images.folders import folder_of
from echelon.zoo.entry import Data, Dataset, Request

PICTURES = ("jpg", "jpeg", "png", "webp")
BLOCK = 512


@dataclass
class TarIndex:
    """The images of one tar, by key, as (offset, size in bytes), and the labels by key."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


class TarImageStore:
    """Images inside tar files."""

    def __init__(self, paths: list[Path], rows: Numbers) -> None:
        """Store the table of images.

        rows: for each image the index of its tar, its offset there and its size in bytes
        """
        self._paths, self._rows = [str(path) for path in paths], rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes:
        number, place, size = self._rows[index].tolist()
        try:
            with open(self._paths[number], "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, place)
        except OSError as error:
            raise DataError(f"{self._paths[number]} cannot be read: {error.strerror}; was it moved?") from None
        if len(data) < size:
            raise DataError(f"{self._paths[number]} is cut off; fetch it again")
        return data

    def name(self, index: int) -> str:
        return f"{self._paths[self._rows[index, 0]]} (the picture at byte {self._rows[index, 1]})"

    def sizes(self) -> Numbers:
        return self._rows[:, 2]


def open_tars(request: Request) -> Data:
    folder, pattern = folder_of(request, "tar_shards"), request.get("file_pattern", "*.tar")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise DataError(
            f"tar_shards: {folder} has no file that fits '{pattern}'; check --dataset_dir or --file_pattern"
        )
    return encoded(request, catalogue(paths, folder))


def catalogue(paths: list[Path], folder: Path) -> ImageCatalogue:
    """Return the images of all tars; those with val or test in their names are the test part.

    Without such tars, every tenth image of a class is for tests.
    """
    found = [_members(path) for path in paths]
    rows = [(number, *one.places[key]) for number, one in enumerate(found) for key in one.places]
    labels = np.array([one.labels[key] for one in found for key in one.places], dtype=np.int64)
    if not rows:
        raise DataError(f"tar_shards: the tars of {folder} hold no pictures; KEY.jpg and KEY.cls belong in them")
    table = np.array(rows, dtype=np.int64)
    for_tests = np.array(["val" in path.name or "test" in path.name for path in paths])
    is_test = for_tests[table[:, 0]] if for_tests.any() and not for_tests.all() else every_tenth(labels)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    classes = 1 + int(labels.max())
    about = f"{len(train):,} images in {classes:,} classes of {len(paths)} tars in {folder}, {len(test):,} to test on"
    return ImageCatalogue(
        store=TarImageStore(paths, table), labels=labels, train=train, test=test, classes=classes, about=about
    )


def _members(path: Path) -> TarIndex:
    result, size = TarIndex(), path.stat().st_size
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                _note(result, tar, member, path, size)
            end = tar.offset
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path} is no whole tar file ({error}); fetch it again") from None
    _need_end(path, end, size)
    unlabelled = next((key for key in result.places if key not in result.labels), None)
    if unlabelled is not None:
        raise DataError(f"{path} has a picture {unlabelled} without {unlabelled}.cls; each needs its label beside it")
    return result


def _note(found: TarIndex, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, size: int) -> None:
    if not member.isfile():
        return
    if member.offset_data + member.size > size:
        raise DataError(f"{path} is cut off inside of {member.name}; fetch it again")
    directory, _, name = member.name.rpartition("/")
    key, _, kind = name.partition(".")
    key = f"{directory}/{key}" if directory else key
    if kind.lower() in PICTURES:
        found.places[key] = (member.offset_data, member.size)
    elif kind == "cls":
        content = tar.extractfile(member)
        text = content.read().decode(errors="replace").strip() if content else ""
        if not text.isdecimal():
            raise DataError(f"{path}: {member.name} holds '{text[:20]}', and a label is a number from 0 on")
        found.labels[key] = int(text)


def _need_end(path: Path, end: int, size: int) -> None:
    """Raise DataError if the tar does not end with a block of zeros: it was truncated between two members."""
    with open(path, "rb") as file:
        blocks = (os.pread(file.fileno(), BLOCK, place) for place in (end - BLOCK, end))
        if size < BLOCK or not any(block == bytes(BLOCK) for block in blocks):
            raise DataError(f"{path} is cut off: the mark of its end is missing; fetch it again")


registry.add(
    Dataset(
        name="tar_shards",
        open=open_tars,
        tasks=("classify_images",),
        about="pictures in tar files, KEY.jpg beside KEY.cls (webdataset); --file_pattern chooses",
    )
)
