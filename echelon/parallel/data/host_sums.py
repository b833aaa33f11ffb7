"""Sums between the ranks of one host, in memory that they share: no message leaves the process.

Each sum has a region at the same offset in every rank's memory file, with places for some chunks in turn. A rank copies
a chunk of its numbers there, rings, and adds up the chunks of all ranks, always in the order of ranks, so that all
ranks get the same bits, whatever their number.

A rank copies at most ``AHEAD`` chunks more than it has added up, and there are twice as many places. So when it has
heard a chunk of every rank, the one whose place it writes to next has been added up by all: ranks need not say so.
"""

from __future__ import annotations

import struct
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import MismatchError
from echelon.distributed.activity import activity, waiting
from echelon.distributed.host_memory import HostMemory

#: Bytes of a chunk: two of them stay in a core's cache.
CHUNK = 1 << 20
#: Chunks of a longer sum that may be copied before they are added up.
AHEAD = 2
#: Most ranks of a sum: each reads the numbers of all, so that for more of them Gloo's ring has less to do.
MOST_RANKS = 8
_LINE = 64
_NOTE = struct.Struct("q")  # number of a sum, of which another chunk is there


class HostSums:
    """All sums of one group of ranks, which must ask for the same ones in the same order."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._others = [rank for rank in range(memory.ranks) if rank != memory.rank]
        self._heard: dict[int, list[int]] = defaultdict(lambda: [0] * memory.ranks)  # chunks by sum and rank
        self._made, self._end = 0, 0

    def sum_over(self, row: Tensor, group: dist.ProcessGroup, call: str, what: str) -> HostAllReduce:
        """Return a reusable sum whose result is in ``row``; ``group`` has the same ranks."""
        number, offset = self._made, self._end
        made = HostAllReduce(self, number, offset, row, group, call, what)
        self._made, self._end = number + 1, offset + made.nbytes
        self.memory.files[self.memory.rank][0].reserve(self._end)
        return made

    def ring(self, number: int) -> None:
        """Tell the other ranks that the next chunk of a sum is there.

        While one of them takes no more notes, those of the others are read: else ranks could wait for each other.
        """
        for rank in self._others:
            while not self.memory.try_to_ring(rank, _NOTE.pack(number)):
                for other in self.memory.wait_for_room(rank):
                    self._hear(other)

    def wait(self, number: int, chunks: int) -> None:
        """Wait until every rank has copied this many chunks of a sum."""
        heard = self._heard[number]
        for rank in self._others:
            while heard[rank] < chunks:
                self._hear(rank)

    def _hear(self, rank: int) -> None:
        (number,) = _NOTE.unpack(self.memory.heard(rank, _NOTE.size))
        if not 0 <= number < self._made:
            raise MismatchError(
                f"rank {rank} sums up other gradients than rank {self.memory.rank}; every rank must build the same "
                "model, optimizer and strategy"
            )
        self._heard[number][rank] += 1


class HostAllReduce:
    """An ``AllReduce`` between the ranks of one host. A row of one chunk is written where the others read it."""

    def __init__(
        self, sums: HostSums, number: int, offset: int, row: Tensor, group: dist.ProcessGroup, call: str, what: str
    ) -> None:
        self._sums, self._number, self._group, self._call, self._what = sums, number, group, call, what
        self._row, self._offset = row, offset
        self._chunks = torch.split(row, CHUNK // row.element_size())
        self._ahead = min(len(self._chunks), AHEAD)
        self._bytes = -(-min(row.nbytes, CHUNK) // _LINE) * _LINE  # of a place
        self._places: dict[tuple[int, int], Tensor] = {}  # by rank and place
        self._copied = self._added = 0  # chunks in all steps so far
        self._begun, self._since = 0, 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the region in each rank's memory file."""
        return 2 * self._ahead * self._bytes

    def entry(self) -> Tensor:
        if len(self._chunks) > 1:
            return self._row
        return self._place(self._sums.memory.rank, self._added)[: len(self._row)]

    @torch.no_grad()
    def start(self) -> None:
        self._begun = self._added
        self._since = activity.now() if activity.recorder is not None else 0.0
        self._copy_ahead()

    def turn(self) -> None:
        """Do nothing: chunks are added up when their sum is needed."""

    @torch.no_grad()
    def finish(self) -> None:
        waited = activity.now()
        with waiting(self._call, self._what, self._group):
            for chunk in self._chunks:
                self._sums.wait(self._number, self._added + 1)
                self._add_up(chunk)
                self._added += 1
                self._copy_ahead()
        if self._since and activity.recorder is not None:
            key = f"{self._group.group_name}/memory/{self._number}/{self._begun}"
            activity.recorder.summed(self._call, self._since, waited, self._row.nbytes, self._group, key)

    def _copy_ahead(self) -> None:
        """Copy the next chunks of this rank's numbers to their places, and ring."""
        own = self._sums.memory.rank
        while self._copied < min(self._added + self._ahead, self._begun + len(self._chunks)):
            if len(self._chunks) > 1:
                chunk = self._chunks[self._copied - self._begun]
                self._place(own, self._copied)[: len(chunk)].copy_(chunk)
            self._copied += 1
            self._sums.ring(self._number)

    def _place(self, rank: int, turn: int) -> Tensor:
        """Return a rank's place for a chunk. The memory of another rank is there when it has rung."""
        place = turn % (2 * self._ahead)
        if (rank, place) not in self._places:
            begin = self._offset + place * self._bytes
            part = self._sums.memory.files[rank][0].at(begin, self._bytes)
            self._places[rank, place] = torch.from_numpy(part.view(self._row.numpy().dtype))
        return self._places[rank, place]

    def _add_up(self, chunk: Tensor) -> None:
        ranks = self._sums.memory.ranks
        parts = [self._place(rank, self._added)[: len(chunk)] for rank in range(ranks)]
        torch.add(parts[0], parts[1], out=chunk)
        for part in parts[2:]:
            chunk.add_(part)
