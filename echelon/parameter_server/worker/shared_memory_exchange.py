"""``SharedMemoryExchange``: messages between the workers of one host lie in memory that they share.

Each worker writes into two memory files of its own in turn, and tells every other worker where its message lies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch.distributed as dist

from echelon.distributed.activity import waiting
from echelon.distributed.host_memory import HostMemory, share_host_memory
from echelon.parameter_server.worker.row_exchange import Bytes, aligned

_NOTE = struct.Struct("qq")  # offset and length of a message


class SharedMemoryExchange:
    """An exchange between the workers of one host, each of which has two memory files."""

    how = "shared memory"

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._rank = memory, memory.rank
        self._turn = 0
        self._notes: list[tuple[int, int]] = []

    def outgoing(self, sizes: Sequence[int]) -> list[Bytes]:
        own = self._memory.files[self._rank][self._turn]
        self._notes, offset = [], 0
        for size in sizes:
            self._notes.append((offset, size))
            offset += aligned(size)
        own.reserve(offset)
        own.at(0, offset)  # mapped at once
        return [own.at(*note) for note in self._notes]

    def swap(self, kind: int) -> list[Bytes]:
        turn, self._turn = self._turn, 1 - self._turn
        memory, notes = self._memory, [(0, 0)] * self._memory.ranks
        with waiting("rows of tables", "", None):
            for worker in memory.bells:
                memory.ring(worker, _NOTE.pack(*self._notes[worker]))
            for worker in memory.bells:
                notes[worker] = _NOTE.unpack(memory.heard(worker, _NOTE.size))
        notes[self._rank] = self._notes[self._rank]
        return [memory.files[worker][turn].at(*note) for worker, note in enumerate(notes)]

    def close(self) -> None:
        self._memory.close()


def share_memory(control: dist.ProcessGroup, timeout: float) -> SharedMemoryExchange | None:
    """Return an exchange if all workers are on one host and can share memory; else None, on all of them."""
    memory = share_host_memory(control, 2, timeout, "worker", "exchange of rows of sparse tables")
    return None if memory is None else SharedMemoryExchange(memory)
