"""The data set ``cifar10``: 60,000 images of 32 x 32 in 10 classes, from its binary or Python files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echelon.base.errors import DataError
from echelon.zoo import registry
from echelon.zoo.datasets.images.arrays import Images, Labels, arrays
from echelon.zoo.datasets.images.folders import folder_of, refuse_unfinished
from echelon.zoo.datasets.images.pickled import read_pickled
from echelon.zoo.entry import Data, Dataset, Request

PIXELS = 3 * 32 * 32
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
FOLDERS = (".", "cifar-10-batches-bin", "cifar-10-batches-py")


def open_cifar10(request: Request) -> Data:
    folder, ending = _found(folder_of(request, "cifar10"))
    refuse_unfinished(folder, sorted(path.name for path in folder.iterdir()))
    missing = [name + ending for name in (*TRAIN, TEST) if not (folder / (name + ending)).exists()]
    if missing:
        raise DataError(f"cifar10: {folder} lacks {', '.join(missing)}; fetch and unpack the data again")
    parts = [_read(folder / (name + ending)) for name in TRAIN]
    train = np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
    test = _read(folder / (TEST + ending))
    return arrays(
        request, train, test, f"{len(train[0]):,} images of 32 x 32, {len(test[0]):,} to test on, of {folder}"
    )


def _found(folder: Path) -> tuple[Path, str]:
    for inner in FOLDERS:
        for ending in (".bin", ""):
            if any((folder / inner / (name + ending)).is_file() for name in (*TRAIN, TEST)):
                return folder / inner, ending
    raise DataError(f"cifar10: {folder} has no data_batch_1 (or .bin); unpack cifar-10-binary.tar.gz there")


def _read(path: Path) -> tuple[Images, Labels]:
    if path.suffix == ".bin":
        return _read_binary(path)
    content = read_pickled(path)
    pixels, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or pixels.shape != (len(labels), PIXELS):
        raise DataError(
            f"{path} does not hold CIFAR-10's images and labels; take the binary version (data_batch_1.bin)"
        )
    return _by_pixel(path, pixels, np.array(labels))


def _read_binary(path: Path) -> tuple[Images, Labels]:
    """Read rows of one label byte and the pixels, red plane first."""
    data = np.fromfile(path, np.uint8)
    if not len(data) or len(data) % (1 + PIXELS):
        raise DataError(f"{path} has {len(data):,} bytes, which are no whole images of {1 + PIXELS:,}; fetch it again")
    rows = data.reshape(-1, 1 + PIXELS)
    return _by_pixel(path, rows[:, 1:], rows[:, 0])


def _by_pixel(path: Path, planes: Images, labels: Labels) -> tuple[Images, Labels]:
    if not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(f"{path} has a label of {labels.max()}, and CIFAR-10's are 0 to 9; fetch it again")
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


registry.add(
    Dataset(
        name="cifar10",
        open=open_cifar10,
        tasks=("classify_images",),
        about="60,000 images of 32 x 32 in 10 classes: the binary or the Python version",
    )
)
