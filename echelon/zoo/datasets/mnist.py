"""The data set ``mnist`` and others in IDX files (Fashion-MNIST, EMNIST), plain or compressed with gzip."""

from __future__ import annotations

import fnmatch
import gzip
import math
import re
import zlib
from pathlib import Path

import numpy as np

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.images.arrays import Images, Labels, arrays
from echelon.zoo.datasets.images.folders import folder_of
from echelon.zoo.entry import Data, Dataset, Request

IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz)?$")
TEST = re.compile(r"^(t10k|test)[-_]")


def open_mnist(request: Request) -> Data:
    folder = folder_of(request, "mnist")
    train_file, test_file = _image_files(folder, request.get("file_pattern"))
    images, labels = _pairs(train_file)
    if test_file is not None:
        train, test, how = (images, labels), _pairs(test_file), f"test: {test_file.name}"
    else:
        cut = len(images) - len(images) // 5
        train, test = (images[:cut], labels[:cut]), (images[cut:], labels[cut:])
        how = "no test file: the last fifth is for tests"
    about = f"{len(train[0]):,} images of {train_file.name}, {len(test[0]):,} to test on ({how})"
    return arrays(request, train, test, about)


def _image_files(folder: Path, pattern: str | None) -> tuple[Path, Path | None]:
    """Return the file of training images, and the file of test images, or None if there is none."""
    names = sorted(path.name for path in folder.iterdir() if IMAGES.search(path.name))
    names = [name for name in names if pattern is None or fnmatch.fnmatch(name, pattern)]
    if not names:
        fitting = f" that fits '{pattern}'" if pattern else ""
        raise DataError(
            f"mnist: {folder} has no file of images{fitting}; put train-images-idx3-ubyte(.gz) and its labels there"
        )
    tests = [name for name in names if TEST.search(name)]
    trains = [name for name in names if name not in tests]
    if len({name.removesuffix(".gz") for name in trains}) > 1:
        raise DataError(
            f"mnist: {folder} has several files of images ({', '.join(trains)}); choose with --file_pattern"
        )
    if not trains:
        return folder / tests[0], None
    return folder / trains[0], folder / tests[0] if tests else None


def _pairs(images_file: Path) -> tuple[Images, Labels]:
    stem = images_file.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    found = [path for ending in ("", ".gz") if (path := images_file.with_name(stem + ending)).exists()]
    if not found:
        raise DataError(
            f"mnist: {images_file.name} has no labels beside it; {stem} is missing from {images_file.parent}"
        )
    images, labels = read_idx(images_file, 3), read_idx(found[0], 1)
    if len(images) != len(labels):
        raise DataError(f"mnist: {images_file.name} has {len(images)} images and {found[0].name} {len(labels)} labels")
    return images, labels


def read_idx(path: Path, dimensions: int) -> Images:
    """Read an IDX file of bytes: two zeros, 8 (for bytes), the number of dimensions, each size, then the values."""
    data = _content(path)
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path} is no IDX file of bytes in {dimensions} dimensions; fetch it again")
    shape = np.frombuffer(data, ">u4", dimensions, 4).tolist()
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{path} has {len(data) - header:,} bytes of values where {math.prod(shape):,} belong; fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is cut off or damaged ({error}); fetch it again") from None


registry.add(
    Dataset(
        name="mnist",
        open=open_mnist,
        tasks=("classify_images",),
        about="handwritten digits, and others in IDX files; --file_pattern chooses",
        defaults={"preprocessing_name": "lenet"},
    )
)
