"""Support for loops with fewer passes per update on more processes (``gradient_accumulation_steps //= world_size``).

One process then makes a multiple of the ranks' passes, each with a part of the loss. The process is given the ranks'
batches of an update several times: the sums of losses and gradients are then those of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accumulation:
    """Mapping of the passes of one process to the passes of the ranks.

    own:    passes per update in one process
    ranks:  passes per update on the ranks
    events: batches and random draws per pass
    """

    own: int
    ranks: int
    events: int

    @property
    def rounds(self) -> int:
        """The number of times that one process is given the batches of an update."""
        return self.own // self.ranks

    def event(self, number: int) -> int:
        """Return the index of the ranks' event that one process is given as its event ``number``."""
        passed, inside = divmod(number, self.events)
        update, at = divmod(passed, self.own)
        return (update * self.ranks + at % self.ranks) * self.events + inside


def find_accumulation(own: int, passes: Sequence[int], marks: Sequence[int]) -> Accumulation | None:
    """Return the mapping of passes; None if the number of own passes is not a multiple of the ranks' number, or if
    passes take different numbers of events.

    own:    passes per update in one process
    passes: passes of each update on the ranks
    marks:  number of events before each pass on the ranks
    """
    taken = {after - before for before, after in itertools.pairwise(marks)}
    if len(set(passes)) != 1 or own % passes[0] or len(taken) > 1:
        return None
    events = taken.pop() if taken else marks[0]
    return Accumulation(own, passes[0], events) if events else None
