"""One clock for all ranks: how far each one's clock is from rank 0's, and how surely that is known.

A rank sends its question, rank 0 answers with its time. If the way there takes as long as the way back, rank 0's clock
showed that in the middle of the round trip; at worst the answer is wrong by half of it. Of several rounds the quickest
is taken (Cristian 1989). Asked before and after a recording, the clocks' drift between is known too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.observability.trace.span_recorder import now

#: Rounds with each rank, and with all of them together at most: rank 0 answers one after the other.
ROUNDS, ALL_ROUNDS, LEAST = 16, 4096, 3


class ClockOffset(NamedTuple):
    """Rank 0's clock shows ``at + seconds`` when ours shows ``at``, give or take ``error``."""

    at: float
    seconds: float
    error: float


class ClockMapping(NamedTuple):
    """From this rank's clock to rank 0's, on a straight line through two measured offsets."""

    before: ClockOffset
    after: ClockOffset

    @property
    def error(self) -> float:
        return max(self.before.error, self.after.error)

    @property
    def drift(self) -> float:
        """Seconds that rank 0's clock gains in one of ours."""
        between = self.after.at - self.before.at
        change = self.after.seconds - self.before.seconds
        return change / between if between > 0 and abs(change) > self.error else 0.0

    def __call__(self, at: float) -> float:
        return at + self.before.seconds + self.drift * (at - self.before.at)


def measure(group: dist.ProcessGroup | None, clock: Callable[[], float] = now) -> ClockOffset:
    """This rank's offset to the first rank of ``group``; all of its ranks call it together."""
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
    came = clock()
    middle = (sent + came) / 2
    return ClockOffset(middle, float(message) - middle, (came - sent) / 2)


def _answer(group: dist.ProcessGroup, clock: Callable[[], float]) -> None:
    message = torch.zeros((), dtype=torch.float64)
    for place in range(1, dist.get_world_size(group)):
        rank = dist.get_global_rank(group, place)
        for _ in range(_rounds(group)):
            dist.recv(message, rank, group=group)
            message.fill_(clock())
            dist.send(message, rank, group=group)
