"""``DataIdentity``: identifies a data set in a checkpoint, so that a resumed run notices that its data has changed.

It is cheap: the size, a checksum of some rows of tensors, and the names, sizes and ends of some files. Data that only
user code can read is known by its size alone. Dates are not compared, because copies of a file have others, and neither
are directories above all files, because data is moved.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset

from echelon.data.fingerprint import INDICES, dataset_fingerprint
from echelon.data.repeated import Repeated

#: Files that are opened, and bytes that are read at either end of each.
FILES, BYTES = 64, 4096


class DataIdentity(NamedTuple):
    """Size and checksum of a data set; None: unknown.

    files: number of files
    """

    size: int | None
    checksum: int | None
    files: int | None = None

    def __str__(self) -> str:
        parts = [] if self.size is None else [f"{self.size} samples"]
        parts += [] if self.files is None else [f"{self.files} files"]
        parts += [] if self.checksum is None else [f"checksum {self.checksum:08x}"]
        return ", ".join(parts)

    def differs(self, other: DataIdentity) -> bool:
        """Return True if something that is known of both is not the same."""
        return any(None not in pair and pair[0] != pair[1] for pair in zip(self, other, strict=True))


def data_identity(dataset: Any, size: int | None) -> DataIdentity:
    """Return the identity of a data set of ``size`` samples."""
    try:
        paths, chosen = _paths(dataset)
        if paths:
            return DataIdentity(size, _files_checksum(paths, chosen), len(paths))
    except Exception:  # such as files that are not local
        return DataIdentity(size, None)
    return DataIdentity(size, None if size is None else dataset_fingerprint(dataset, size).contents)


def stored_identity(facts: Mapping[str, Any] | None) -> DataIdentity:
    """Return the identity that a loader's state holds; states of earlier versions hold none."""
    known = {name: value for name, value in (facts or {}).items() if isinstance(value, int)}
    return DataIdentity(*(known.get(name) for name in DataIdentity._fields))


def _paths(dataset: Any) -> tuple[Sequence[str], int]:
    """Return the files that a data set reads, none if they are not known, and a checksum of the samples chosen."""
    chosen = 0
    while type(dataset) in (Subset, Repeated):
        if type(dataset) is Subset:
            chosen = zlib.crc32(np.asarray(dataset.indices[:INDICES], dtype=np.int64).tobytes(), chosen)
        dataset = dataset.dataset
    paths = getattr(dataset, "paths", None)
    if paths is None:  # pairs of a file and its class, as in torchvision
        pairs = getattr(dataset, "samples", None)
        paths = [pair[0] for pair in pairs] if isinstance(pairs, list) and all(map(_is_pair, pairs[:1])) else ()
    known = isinstance(paths, list | tuple) and all(isinstance(path, str) for path in paths)
    return (paths if known else ()), chosen


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple) and bool(sample) and isinstance(sample[0], str)


def _files_checksum(paths: Sequence[str], chosen: int) -> int:
    """Return a checksum of all names, and of the sizes and ends of some files, that continues ``chosen``."""
    above = os.path.commonpath({os.path.dirname(path) for path in paths})
    names = "\n".join(path[len(above) :].lstrip("/") for path in paths)
    result = zlib.crc32(names.encode(errors="surrogateescape"), chosen)
    for at in np.unique(np.linspace(0, len(paths) - 1, min(FILES, len(paths))).astype(int)):
        size = _size(paths[at])
        with open(paths[at], "rb") as file:
            result = zlib.crc32(f"{size} ".encode() + file.read(BYTES), result)
            file.seek(max(size - BYTES, 0))
            result = zlib.crc32(file.read(BYTES), result)
    return result


def _size(path: str) -> int:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # a pipe may be read once only, and has no end to read
        raise ValueError(f"{path} is no file")
    return found.st_size
