"""A memory file with two slots for the snapshots of one rank: while one is written, the other stays complete.

A slot consists of a seal, space for facts (JSON), and space for tensors. The seal is broken before anything in the slot
changes and set when all of it is written, with a checksum over the facts; a writer that is killed in between leaves a
broken seal. The tensors have no checksum: it would cost as much as the copy, in every step, and training trusts the
same memory with the same values anyway.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

_SEAL = struct.Struct("<qqqI")  # sequence number of the snapshot, step, bytes of facts, checksum
_PAGE = 4096
_FACTS = 64  # offset of the facts
#: Fraction of the free memory that is left to other programs of the host.
_LEFT = 0.1


@dataclass(frozen=True)
class SealedSnapshot:
    """A complete snapshot."""

    seq: int
    step: int
    facts: bytes


class SnapshotBuffer:
    """Two slots with ``room`` bytes for facts and ``nbytes`` for tensors, in the file ``fd``, which it owns."""

    def __init__(self, fd: int, room: int, nbytes: int) -> None:
        self.fd, self.room, self.nbytes = fd, room, nbytes
        self._data = _pages(_FACTS + room)
        self._slot = self._data + _pages(nbytes)
        self.memory = mmap.mmap(fd, 2 * self._slot)
        self.file = os.fdopen(fd, "rb", buffering=0, closefd=False)  # for sendfile

    @staticmethod
    def size(room: int, nbytes: int) -> int:
        return 2 * (_pages(_FACTS + room) + _pages(nbytes))

    @staticmethod
    def make(room: int, nbytes: int) -> SnapshotBuffer:
        """Allocate all memory now, so that a lack of memory is reported here. Raises ``MemoryError``."""
        size = SnapshotBuffer.size(room, nbytes)
        if size > (free := free_memory()) * (1 - _LEFT):
            raise MemoryError(f"the snapshot needs {size >> 20} MB and {free >> 20} MB are free")
        fd = os.memfd_create("echelon-copies")
        try:
            os.posix_fallocate(fd, 0, size)
            return SnapshotBuffer(fd, room, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def data(self, slot: int) -> int:
        """Return the offset of the tensors of a slot."""
        return slot * self._slot + self._data

    def break_seal(self, slot: int) -> None:
        at = slot * self._slot
        self.memory[at : at + _SEAL.size] = bytes(_SEAL.size)

    def seal(self, slot: int, seq: int, step: int, facts: bytes) -> None:
        assert seq > 0
        assert len(facts) <= self.room
        at = slot * self._slot
        self.memory[at + _FACTS : at + _FACTS + len(facts)] = facts
        self.memory[at : at + _SEAL.size] = _SEAL.pack(seq, step, len(facts), _checksum(seq, step, facts))

    def sealed(self, slot: int) -> SealedSnapshot | None:
        """Return the snapshot in a slot, if it is complete."""
        at = slot * self._slot
        seq, step, length, checksum = _SEAL.unpack_from(self.memory, at)
        if seq <= 0 or not 0 <= length <= self.room:
            return None
        facts = self.memory[at + _FACTS : at + _FACTS + length]
        return SealedSnapshot(seq, step, facts) if _checksum(seq, step, facts) == checksum else None

    def close(self) -> None:
        self.file.close()
        with contextlib.suppress(BufferError):  # a reader has a view; the memory is freed with the last view
            self.memory.close()
        os.close(self.fd)


def _checksum(seq: int, step: int, facts: bytes) -> int:
    return zlib.crc32(facts, zlib.crc32(struct.pack("<qq", seq, step)))


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def free_memory() -> int:
    """Return the free bytes of the host, or of the container of this process."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # the file says "max" without a limit
        used = int((group / "memory.current").read_text()) - _reclaimable(group / "memory.stat")
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free


def _reclaimable(stat: Path) -> int:
    """Return the bytes of file pages that the kernel counts as used but can reclaim."""
    lines = dict(line.split() for line in stat.read_text().splitlines())
    return int(lines.get("inactive_file", 0)) + int(lines.get("active_file", 0))
