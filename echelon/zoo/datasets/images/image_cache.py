"""``--datasets_use_caching``: picture files kept in memory as they were read.

What is kept is the compressed bytes, before anything random happens: augmentation stays fresh, and a picture takes a
tenth of its pixels' room. One piece of shared memory serves all worker processes of all ranks of a host, since in the
course of some epochs each of them comes to read every picture. It pays where files come over a network: those of a
local disk are kept by the operating system anyway.

The memory is a file of /dev/shm without a name: all ranks open it, and when all have, it is taken out of the folder. It
is gone with the last process, however that ends.
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
    """A store that reads every picture once."""

    def __init__(self, store: ImageStore) -> None:
        self._store, self._sizes = store, store.sizes()
        # a byte for each picture that says whether it is there, then the pictures one after the other
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
        # two processes that read the same picture at once write the same bytes
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
    except FileNotFoundError:  # another rank was quicker
        return


def _fingerprint(store: ImageStore, sizes: Numbers) -> str:
    """The same on all ranks of a job that read the same files."""
    digest = hashlib.sha256(sizes.tobytes())
    for index in {0, len(sizes) // 2, len(sizes) - 1}:
        digest.update(os.path.abspath(store.name(index)).encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
