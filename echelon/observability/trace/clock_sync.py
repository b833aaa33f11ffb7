"""Synchronizes clocks: measures the offset of each rank's clock to rank 0's, with its error.

A rank sends a request, and rank 0 answers with its time. If both ways take equally long, rank 0's clock showed this
time in the middle of the round trip; the error is at most half of the round trip. The fastest of several rounds is used
(Cristian 1989). Measurements before and after a trace also give the drift.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.observability.trace.span_recorder import now

#: Most rounds with each rank, most rounds in total (rank 0 answers one rank after another), fewest with each rank.
ROUNDS, ALL_ROUNDS, LEAST = 16, 4096, 3


class ClockOffset(NamedTuple):
    """An offset: rank 0's clock shows ``at + seconds``, plus or minus ``error``, when ours shows ``at``."""

    at: float
    seconds: float
    error: float


class ClockMapping(NamedTuple):
    """A linear mapping from this rank's clock to rank 0's, through two measured offsets."""

    before: ClockOffset
    after: ClockOffset

    @property
    def error(self) -> float:
        return max(self.before.error, self.after.error)

    @property
    def drift(self) -> float:
        """The seconds that rank 0's clock gains per second of ours; 0 if it is within the error."""
        between = self.after.at - self.before.at
        change = self.after.seconds - self.before.seconds
        return change / between if between > 0 and abs(change) > self.error else 0.0

    def __call__(self, at: float) -> float:
        return at + self.before.seconds + self.drift * (at - self.before.at)


def measure(group: dist.ProcessGroup | None, clock: Callable[[], float] = now) -> ClockOffset:
    """Return this rank's offset to the first rank of ``group``; all ranks of the group call it together."""
    if group is None or dist.get_rank(group) == 0:
        if group is not None:
            _answer(group, clock)
        return ClockOffset(clock(), 0.0, 0.0)
    first = dist.get_global_rank(group, 0)
    return min((_ask(first, group, clock) for _ in range(_rounds(group))), key=lambda offset: offset.error)


def _rounds(group: dist.ProcessGroup) -> int:
    return max(LEAST, min(ROUNDS, ALL_ROUNDS // dist.get_world_size(group)))


def _ask(first: int, group: dist.ProcessGroup, clock: Callable[[], float]) -> ClockOffset:
    message = torch.zeros((), dtype=torch.float64)
    sent = clock()
    dist.send(message, first, group=group)
    dist.recv(message, first, group=group)
    received = clock()
    middle = (sent + received) / 2
    return ClockOffset(middle, float(message) - middle, (received - sent) / 2)


def _answer(group: dist.ProcessGroup, clock: Callable[[], float]) -> None:
    message = torch.zeros((), dtype=torch.float64)
    for place in range(1, dist.get_world_size(group)):
        rank = dist.get_global_rank(group, place)
        for _ in range(_rounds(group)):
            dist.recv(message, rank, group=group)
            message.fill_(clock())
            dist.send(message, rank, group=group)
