"""The data sets ``image_folder``, ``flowers`` and ``imagenet``: image files in one folder per class."""

from __future__ import annotations

import fnmatch
import os
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.images.encoded import ImageCatalogue, Numbers, encoded, every_tenth
from echelon.zoo.datasets.images.folders import folder_of, refuse_unfinished
from echelon.zoo.entry import Data, Dataset, Request

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".pgm")
TRAIN, TESTS = "train", ("val", "validation", "test")


class FolderImageStore:
    """Image files below a folder. Their names are one array: a million strings would be copied to every worker."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self._root = os.fsencode(root)
        self._names = np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> bytes:
        try:
            with open(self._path(index), "rb") as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{self.name(index)} cannot be read: {error.strerror}; was it moved or removed?") from None

    def name(self, index: int) -> str:
        return os.fsdecode(self._path(index))

    def sizes(self) -> Numbers:
        return np.array([os.stat(self._path(index)).st_size for index in range(len(self))], dtype=np.int64)

    def _path(self, index: int) -> bytes:
        return os.path.join(self._root, bytes(self._names[index]))


def open_folder(request: Request, what: str, inside: tuple[str, ...] = ()) -> Data:
    """Open a folder of classes as a data set.

    what:   name of the data set in error messages
    inside: names of a folder around the classes, as archives create it
    """
    root = folder_of(request, what)
    root = next((root / name for name in inside if (root / name).is_dir()), root)
    return encoded(request, catalogue(root, what, request.get("file_pattern")))


def catalogue(root: Path, what: str, pattern: str | None) -> ImageCatalogue:
    """Return the images by train.txt with labels, or by folders of classes, in train/ and val/ if they exist.

    Without a test part, every tenth image of a class is for tests.
    """
    if pattern is None and (listed := _listed(root, TRAIN)) is not None:
        return _listed_catalogue(root, *listed)
    train = root / TRAIN if (root / TRAIN).is_dir() else root
    test = next((root / name for name in TESTS if (root / name).is_dir()), None) if train != root else None
    classes = _classes(train, what)
    names, labels = _files(root, train, classes, what, pattern)
    if test is None:
        is_test = every_tenth(labels)
    else:
        more, their_labels = _files(root, test, _same_classes(test, classes, what), what, pattern)
        is_test = np.repeat([False, True], [len(names), len(more)])
        names, labels = names + more, np.concatenate([labels, their_labels])
    return _as_catalogue(FolderImageStore(root, names), labels, is_test, len(classes), root, test)


def _listed(root: Path, phase: str) -> tuple[list[str], list[int]] | None:
    """Return paths and labels from train.txt or val.txt, in the format of Fleet and Caffe; None without such a list."""
    file = root / f"{phase}.txt"
    if not file.is_file():
        return None
    rows = [line.rsplit(maxsplit=1) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or len(rows[0]) != 2 or not (root / phase / rows[0][0]).is_file():
        return None  # a file of the same name with other contents
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or not row[1].isdecimal() or ".." in Path(row[0]).parts or Path(row[0]).is_absolute():
            got = " ".join(row)[:60]
            raise DataError(f"{file}, line {number}: expected 'PATH LABEL', a path in {phase}/, got {got!r}")
    return [f"{phase}/{path}" for path, _ in rows], [int(label) for _, label in rows]


def _listed_catalogue(root: Path, names: list[str], labels: list[int]) -> ImageCatalogue:
    found = next(((phase, listed) for phase in TESTS if (listed := _listed(root, phase)) is not None), None)
    test, (more, their_labels) = (root / found[0], found[1]) if found else (None, ([], []))
    every = np.array(labels + their_labels, dtype=np.int64)
    is_test = np.repeat([False, True], [len(names), len(more)]) if found else every_tenth(every)
    return _as_catalogue(FolderImageStore(root, names + more), every, is_test, int(every.max()) + 1, root, test)


def _as_catalogue(
    store: FolderImageStore, labels: Numbers, is_test: NDArray[np.bool_], classes: int, root: Path, test: Path | None
) -> ImageCatalogue:
    train, tests = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    how = f"those of {test.name}/" if test else "each tenth of a class"
    about = f"{len(train):,} images in {classes:,} classes of {root}, {len(tests):,} to test on ({how})"
    return ImageCatalogue(store=store, labels=labels, train=train, test=tests, classes=classes, about=about)


def _classes(folder: Path, what: str) -> dict[str, int]:
    """Return the number of each class by name; numbers follow the order of names."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{what}: {folder} has no folders; pictures belong in {folder}/CLASS/, a folder for each class")
    return {name: number for number, name in enumerate(names)}


def _same_classes(folder: Path, classes: dict[str, int], what: str) -> dict[str, int]:
    result = _classes(folder, what)
    for name in result:
        if name not in classes:
            raise DataError(f"{what}: {folder / name} is a class that {TRAIN}/ does not have; remove or add it")
    return {name: classes[name] for name in result}


def _files(
    root: Path, folder: Path, classes: dict[str, int], what: str, pattern: str | None
) -> tuple[list[str], Numbers]:
    """Return the paths below ``root``, in order, and their labels."""
    names: list[str] = []
    labels: list[int] = []
    for name, label in classes.items():
        found = _pictures(folder / name, pattern)
        if not found:
            fitting = f" that fit '{pattern}'" if pattern else ""
            raise DataError(f"{what}: class folder {folder / name} has no pictures{fitting}; fill it or remove it")
        start = (folder / name).relative_to(root)
        names += [str(start / file) for file in found]
        labels += [label] * len(found)
    return names, np.array(labels, dtype=np.int64)


def _pictures(folder: Path, pattern: str | None) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    refuse_unfinished(folder, names)
    if pattern is not None:
        return fnmatch.filter(names, pattern)
    return [name for name in names if name.lower().endswith(PICTURES)]


for _name, _about, _inside in (
    ("image_folder", "pictures in a folder for each class, with train/ and val/ above them or not", ()),
    ("flowers", "flower_photos: 3,670 pictures of 5 kinds, a folder for each", ("flower_photos",)),
    ("imagenet", "ILSVRC 2012: train/CLASS/*.JPEG and val/CLASS/*.JPEG", ()),
):
    registry.add(
        Dataset(
            name=_name,
            open=partial(open_folder, what=_name, inside=_inside),
            tasks=("classify_images",),
            about=_about,
        )
    )
