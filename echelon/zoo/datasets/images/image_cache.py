"""Cache of image files in shared memory, for ``--datasets_use_caching``.

The cache holds the compressed bytes, before random augmentation, so each epoch has new augmentations and an image takes
a tenth of the memory of its pixels. One shared-memory block serves all worker processes of all ranks of a host, because
over some epochs each process reads every image. The cache helps if files come over a network: the operating system
already caches those of a local disk.

The memory is a file in /dev/shm that is unlinked when all ranks have opened it. The memory is freed when the last
process ends, even after a crash.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from typing import TYPE_CHECKING

import numpy as np

import echelon
from echelon.base.errors import DataError

if TYPE_CHECKING:
    from echelon.zoo.datasets.images.encoded import ImageStore, Numbers

SHARED = "/dev/shm"


class CachedImageStore:
    """A store that reads every image file once and keeps it in shared memory."""

    def __init__(self, store: ImageStore) -> None:
        self._store, self._sizes = store, store.sizes()
        # Layout: one byte per image that is 1 when the image is cached, then all images one after another.
        self._starts = len(store) + np.concatenate([[0], np.cumsum(self._sizes)])
        self._memory = _shared_memory(int(self._starts[-1]), _fingerprint(store, self._sizes))

    def __len__(self) -> int:
        return len(self._store)

    def name(self, index: int) -> str:
        return self._store.name(index)

    def sizes(self) -> Numbers:
        return self._sizes

    def read(self, index: int) -> bytes:
        begin, end = int(self._starts[index]), int(self._starts[index + 1])
        if self._memory[index]:
            return self._memory[begin:end]
        data = self._store.read(index)
        if len(data) != end - begin:
            raise DataError(f"{self.name(index)} has changed while it was in use; begin again when it is complete")
        # No lock is needed: two processes that read the same image at once write the same bytes.
        self._memory[begin:end] = data
        self._memory[index] = 1
        return data


def _shared_memory(size: int, fingerprint: str) -> mmap.mmap:
    _need_room(size)
    path = f"{SHARED}/echelon-{os.getuid()}-{os.environ.get('MASTER_PORT', os.getpid())}-{fingerprint}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise DataError(f"{path} belongs to another user; remove it, or leave datasets_use_caching out")
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        echelon.barrier()
    finally:
        os.close(file)
        if os.path.exists(path):
            _remove(path)
    return memory


def _need_room(size: int) -> None:
    free = shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else 0
    if size > free:
        raise DataError(
            f"datasets_use_caching needs {size / 2**30:.1f} GiB of shared memory, and {SHARED} has {free / 2**30:.1f} "
            "GiB left; leave it out, or give the machine more"
        )


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:  # another rank has removed it first
        return


def _fingerprint(store: ImageStore, sizes: Numbers) -> str:
    """Return a hash that is the same on all ranks that read the same files."""
    digest = hashlib.sha256(sizes.tobytes())
    for index in {0, len(sizes) // 2, len(sizes) - 1}:
        digest.update(os.path.abspath(store.name(index)).encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
