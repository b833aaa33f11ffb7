"""Order of the all-gathers of units: all ranks start the same all-gathers whatever modules each of them runs.

A pass (forward of the whole model, or one backward) has an order of units that is equal on all ranks. A rank that needs
a unit starts all all-gathers up to it and discards the results of units that it does not run. At the end of the pass it
starts the remaining ones. So a layer that only some ranks use cannot cause a deadlock, and the next all-gather is known
early enough to prefetch it. The first pass uses the order of the model, later passes the order in which the group's
first rank needed the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from echelon.parallel.zero.shard_unit import ShardUnit
from echelon.parallel.zero.zero_collectives import Arrival, ShardCollectives

Kind = Literal["forward", "backward"]


class GatherOrder:
    """Starts all-gathers of units; calls ``between`` before it waits for one."""

    def __init__(
        self,
        units: Sequence[ShardUnit],
        exchange: ShardCollectives,
        device: torch.device,
        between: Callable[[], None],
    ) -> None:
        self._units, self._exchange, self._device = units, exchange, device
        self._orders: dict[Kind, list[ShardUnit]] = {"forward": list(units), "backward": list(reversed(units))}
        self._learned: set[Kind] = set()
        self.kind: Kind | None = None  #: kind of the running pass
        self._at = 0  # number of all-gathers of the order that were started
        self._ahead: ShardUnit | None = None
        self._needed: list[int] = []
        self._unwanted: list[Arrival] = []
        self._between = between

    def begin(self, kind: Kind) -> None:
        self._drop()
        self.kind, self._at, self._needed = kind, 0, []

    def reach(self, unit: ShardUnit) -> None:
        """Unshard the unit: all-gather it, prefetch the next one, and wait."""
        self._needed.append(unit.number)
        if unit.coming is None:
            self._go_to(unit)
        if unit is self._ahead:
            self._ahead = None
        self._look_ahead()
        self._between()
        unit.arrive()

    def end(self, complete: bool) -> None:
        """Start the all-gathers that were not needed in this pass.

        complete: False if an exception ended forward; then this rank does not wait for other ranks
        """
        assert self.kind is not None
        kind, self.kind = self.kind, None
        self._forget_ahead()
        for unit in self._orders[kind][self._at :]:
            self._unwanted += unit.begin()
        if complete:
            self._drop()
            if kind not in self._learned:
                self._learn(kind)

    def _go_to(self, unit: ShardUnit) -> None:
        order = self._orders[self.kind] if self.kind else []
        if unit in order[self._at :]:
            self._forget_ahead()
            place = order.index(unit, self._at)
            for passed in order[self._at : place]:
                self._unwanted += passed.begin()
            self._at = place + 1
        unit.coming = unit.begin()

    def _look_ahead(self) -> None:
        if self.kind is None or self._ahead is not None or self._at == len(self._orders[self.kind]):
            return
        following = self._orders[self.kind][self._at]
        if following.here or following.coming is not None:
            return
        following.coming = following.begin()
        self._ahead, self._at = following, self._at + 1

    def _forget_ahead(self) -> None:
        if self._ahead is not None and self._ahead.coming is not None:
            self._unwanted += self._ahead.coming
            self._ahead.coming = None
        self._ahead = None

    def _drop(self) -> None:
        """Wait for discarded all-gathers: their memory may be freed only afterwards."""
        for arrival in self._unwanted:
            arrival()
        self._unwanted = []

    def _learn(self, kind: Kind) -> None:
        """Adopt the order in which the group's first rank needed the units; all ranks call this together.

        A unit that the first rank did not need is inserted after its predecessor in the old order.
        """
        self._learned.add(kind)
        length = self._exchange.from_first(torch.tensor([len(self._needed)], device=self._device))
        numbers = torch.zeros(int(length), dtype=torch.int64, device=self._device)
        numbers[: len(self._needed)] = torch.tensor(self._needed, device=self._device)[: len(numbers)]
        order = [self._units[number] for number in self._exchange.from_first(numbers).tolist()]
        for before, unit in zip([None, *self._orders[kind]], self._orders[kind], strict=False):
            if unit not in order:
                order.insert(order.index(before) + 1 if before else 0, unit)
        self._orders[kind] = order
