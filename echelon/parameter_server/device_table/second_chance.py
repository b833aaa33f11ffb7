"""Second chance: rows leave a cache from the clock's hand on, if they were not used since the hand passed them."""

from __future__ import annotations

import torch
from torch import Tensor


class SecondChance:
    """The clock of a cache: whether each row was used since the hand passed it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.used = torch.zeros(size, dtype=torch.bool, device=device)
        self._hand = 0

    def note_used(self, slots: Tensor) -> None:
        """Note the use of rows; negative numbers are no rows."""
        self.used[slots[slots >= 0]] = True

    def select(self, may_go: Tensor, number: int) -> Tensor:
        """Return ``number`` of the rows that may go, or all of them if they are fewer, and move the hand behind them.

        may_go: for each row, True if it is in the cache and not needed now
        """
        size = len(may_go)
        order = (torch.arange(size, device=may_go.device) + self._hand) % size
        may, used = may_go[order], self.used[order]
        unused = may & ~used
        passed = torch.searchsorted(unused.cumsum(0), number).clamp(max=size - 1) + 1
        behind = torch.arange(size, device=may_go.device) < passed
        chosen = order[unused & behind]
        self.used[order[may & behind]] = False
        self._hand = int((self._hand + passed) % size)
        if len(chosen) < number:  # all others were used, and have had their chance now
            rest = order[may & ~unused]
            chosen = torch.cat([chosen, rest[: number - len(chosen)]])
        return chosen
