"""Records of 32-bit words in one range of virtual memory, of which only the used part takes memory (or disk).

Growing copies nothing: the addresses are reserved from the start. With a directory the memory is mapped to a file, so
that the operating system can write cold pages out; the file has no name and vanishes with the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.job_spec import BUCKETS

#: Indices of the counters that kernels advance.
NEXT, FREE, ROWS, SLOTS, STUCK = 0, 1, 2, 3, 4
NONE = -1
#: Columns of the extents: first free slot of the bucket, next slot of its last extent, its end, slots of all extents.
HEAD, AT, END, TAKEN = 0, 1, 2, 3

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
#: The first bytes have small pages, so that a small table takes little memory; huge pages behind them save address
#: translation: with a cold cache a pull takes 0.49 ms in place of 0.65, a push 0.83 in place of 1.1 (7,700 ids).
_SMALL_PAGES = 1 << 21
#: Pages that are read ahead in vain rather than in a run of their own.
_GAP = 8
#: Disk space is allocated in steps of at least this many bytes, so that a full disk is an error and not a crash.
_STEP = 1 << 26


class Arena:
    """An array of slots of ``words`` 32-bit words; a free slot holds the number of the next free slot.

    With a directory the slots of a bucket lie together in extents, so that a snapshot, which goes from bucket to
    bucket, reads and marks each page once. In the order of creation every bucket has a row in almost every page: a base
    of 100 million ids then wrote 106 GB for its first 3 of 8 GB.

    counters:  next slot that was never used, first free slot, rows, usable slots, bucket that had no room for an id
    extents:   by bucket, the columns above; without a directory empty
    """

    def __init__(self, words: int, directory: Path | None) -> None:
        self.words = words
        self._file = self._nameless(directory) if directory is not None else None
        self._map = self._mapped()
        self.words32: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32)
        self.floats = self.words32.view(np.float32)
        self.counters = np.array([0, NONE, 0, 0, 0], np.int64)
        self.extents = np.zeros((BUCKETS if directory is not None else 0, 4), np.int64)
        self.extents[:, HEAD] = NONE
        if self._file is None:
            self.counters[SLOTS] = len(self.words32) // words

    @property
    def nbytes(self) -> int:
        """Bytes of the records, including the free slots among them."""
        return int(self.counters[NEXT]) * self.words * 4

    def more(self) -> None:
        """Make further slots usable. Raises ``EchelonError`` if memory or disk space is exhausted."""
        if self._file is None or self.counters[SLOTS] >= len(self.words32) // self.words:
            raise EchelonError(f"no room for more than {self.counters[NEXT]:,} rows of {self.words * 4} bytes; {_WAYS}")
        size = int(self.counters[SLOTS]) * self.words * 4
        step = min(max(_STEP, size // 4), len(self.words32) * 4 - size)
        try:
            os.posix_fallocate(self._file, size, step)
        except OSError as error:
            raise EchelonError(
                f"no disk space for more than {self.counters[NEXT]:,} rows ({error.strerror}); {_WAYS}"
            ) from None
        self.counters[SLOTS] = (size + step) // (self.words * 4)

    def _nameless(self, directory: Path) -> int:
        """Return an open file without a directory entry; it is closed when the arena is garbage-collected."""
        directory.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(dir=directory)
        os.unlink(name)
        weakref.finalize(self, os.close, file)
        return file

    def fetch(self, slots: NDArray[np.int64]) -> None:
        """Let the system read the pages of these slots ahead, in runs: a page fault reads one page alone."""
        nbytes = self.words * 4
        firsts = np.unique(slots[slots >= 0] * nbytes // mmap.PAGESIZE) if self._file is not None else slots[:0]
        if not len(firsts):
            return
        ends = np.append(np.flatnonzero(np.diff(firsts) > _GAP), len(firsts) - 1)
        begins = np.append(0, ends[:-1] + 1)
        reach = nbytes // mmap.PAGESIZE + 2
        for first, last in zip(firsts[begins].tolist(), firsts[ends].tolist(), strict=True):
            length = min((last - first + reach) * mmap.PAGESIZE, len(self._map) - first * mmap.PAGESIZE)
            self._map.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, length)

    def clear(self) -> None:
        """Free every slot."""
        self.counters[[NEXT, FREE, ROWS]] = 0, NONE, 0
        self.extents[:] = NONE, 0, 0, 0
        if self._file is None:
            self._map.madvise(mmap.MADV_DONTNEED)  # returns the memory to the operating system

    def _mapped(self) -> mmap.mmap:
        size = self._reach()
        if self._file is not None:
            os.ftruncate(self._file, size)
            mapped = mmap.mmap(self._file, size)
            mapped.madvise(mmap.MADV_RANDOM)
            return mapped
        mapped = _reserved(size)
        if len(mapped) > _SMALL_PAGES:
            with contextlib.suppress(OSError):  # a system without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE, _SMALL_PAGES, len(mapped) - _SMALL_PAGES)
        return mapped

    def _reach(self) -> int:
        """Return an upper bound of the bytes that can ever be used."""
        if self._file is None:
            return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        disk = os.fstatvfs(self._file)
        return disk.f_blocks * disk.f_frsize // mmap.PAGESIZE * mmap.PAGESIZE


def _reserved(size: int) -> mmap.mmap:
    """Reserve addresses for ``size`` bytes, or for as many as this process may have."""
    while True:
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            size = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            if size < _STEP:
                raise EchelonError(f"no memory for a table ({error.strerror}); raise the limit (ulimit -v)") from None


_WAYS = "set a capacity, let rows expire, or use more servers"
