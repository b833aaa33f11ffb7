"""Loops that make fewer passes for an update on more processes: ``gradient_accumulation_steps //= world_size``.

One process then makes so many times the passes, each with a part of the loss. It is given the ranks' batches of an
update as often as it takes: the sum of the losses, and of the gradients, is that of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accumulation:
    """How the passes of one process follow those of the ranks.

    own:    passes for an update in one process
    ranks:  passes for an update on the ranks
    events: batches and draws that a pass takes
    """

    own: int
    ranks: int
    events: int

    @property
    def rounds(self) -> int:
        """Return how often one process is given the batches of an update."""
        return self.own // self.ranks

    def event(self, number: int) -> int:
        """Return which of the ranks' events one process is given as its own ``number``."""
        passed, inside = divmod(number, self.events)
        update, at = divmod(passed, self.own)
        return (update * self.ranks + at % self.ranks) * self.events + inside


def find_accumulation(own: int, passes: Sequence[int], marks: Sequence[int]) -> Accumulation | None:
    """Return None where the passes of one process are no multiple of the ranks', or each takes in something else.

    passes: on the ranks, of each update
    marks:  on the ranks, how many events there had been at each pass
    """
    taken = {after - before for before, after in itertools.pairwise(marks)}
    if len(set(passes)) != 1 or own % passes[0] or len(taken) > 1:
        return None
    events = taken.pop() if taken else marks[0]
    return Accumulation(own, passes[0], events) if events else None
