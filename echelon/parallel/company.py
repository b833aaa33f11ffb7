"""Company: the other ranks, as an engine meets them: its connections to them, and what is said where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from echelon.data.likeness import Likeness
from echelon.errors import UsageError
from echelon.parallel.agree import RollCall, agree_on_batch
from echelon.parallel.grid import Grid
from echelon.parallel.groups import Groups
from echelon.parallel.peers import peers_explained
from echelon.plan import Plan
from echelon.world import World

if TYPE_CHECKING:
    from echelon.parallel.local import LocalSteps

CLOSED = "the engine is closed and trains no more; call distribute() for another"


class Company:
    """step: the one that this rank is in, or is about to begin
    warn: told what ranks hardly mean to do
    """

    def __init__(self, world: World, groups: Groups, step: Callable[[], int], warn: Callable[[str], None]) -> None:
        self._rank, self._step, self._warn = world.rank, step, warn
        self._data: list[Callable[[], Likeness | None]] = []  # that ranks have not compared yet
        self._groups: Groups | None = groups  # None when closed
        limit = timedelta(seconds=world.timeout)
        self._roll = RollCall(partial(groups.new, None, "gloo", limit) if world.control is not None else None)
        self._local: LocalSteps | None = None  # ranks step alone, and answer the roll when they meet
        self._sharers: Sequence[int] = ()  # the ranks that work on one batch together
        self._strangers: dist.ProcessGroup | None = None  # the same, until they have compared their first batches

    @property
    def groups(self) -> Groups:
        """What makes connections, until they are let go of."""
        if self._groups is None:
            raise UsageError(CLOSED)
        return self._groups

    def meet(self) -> None:
        """Make the connections of the roll call; see there."""
        self._roll.open()

    def takes(self, plan: Plan, grid: Grid, local: LocalSteps | None) -> None:
        """Go by this plan."""
        if plan.in_parts:
            axes = [axis for axis in ("stage", "split") if axis not in plan.data_axes]
            self._sharers, self._strangers = grid.ranks(*axes), grid.control(*axes)
        self._local = local
        if local is not None:
            local.before_meeting = lambda: self._answer("step")

    def deals_out(self, data: Callable[[], Likeness | None]) -> None:
        """To all ranks, in training: for the next roll call, if there is one."""
        if not self._roll.silent:
            self._data.append(data)

    def answer_roll(self, call: str, *args: Any, **named: Any) -> None:
        """In the first steps, say which call this rank is about to make; where ranks step alone, when they meet."""
        if self._groups is None or ((self._local or self._roll.silent) and call in ("step", "update")):
            return
        sharers = self._sharers if call == "step" and self._strangers is None else ()
        which = named.get("optimizer", args[0] if args else None) if call == "update" else None
        with peers_explained(self.here):
            self._answer(call, repr(which) if which else "", (args, named), sharers)

    def _answer(self, call: str, what: str = "", batch: Any = None, sharers: Sequence[int] = ()) -> None:
        data: list[Likeness | None] = []
        if call in ("step", "update"):  # by now every rank has made its loaders
            data, self._data = [look() for look in self._data], []
        remark = self._roll.answer(call, self._step(), what, batch, sharers, data)
        if remark is not None:
            self._warn(remark)

    def compare(self, batch: Any) -> None:
        """Once, in the first step: ranks that work on one batch together must have been given the same."""
        if self._strangers is not None:
            group, self._strangers = self._strangers, None
            agree_on_batch(batch, group, self._sharers)

    def next_meeting(self) -> int:
        """The next step that no rank can finish without all others."""
        return self._step() if self._local is None else self._local.next_meeting(self._step() - 1)

    def explained(self) -> peers_explained:
        """Around what talks to other ranks."""
        if self._groups is None:
            raise UsageError(CLOSED)
        return peers_explained(self.here)

    def here(self) -> str:
        return f"step {self._step()}, rank {self._rank}"

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
        self._groups = None
