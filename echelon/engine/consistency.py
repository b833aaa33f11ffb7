"""Company: the other ranks, as an engine meets them: its connections to them, and what is said where they part."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echelon.base.environment import VERIFY
from echelon.base.errors import UsageError
from echelon.data.checksums import batch_checksum
from echelon.data.fingerprint import DatasetFingerprint
from echelon.data.unsharded_loaders import loader_watch
from echelon.distributed.activity import activity, calling
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.peer_errors import translate_peer_errors
from echelon.distributed.process_groups import ProcessGroups
from echelon.distributed.world import World
from echelon.engine.collective_calls import PER_STEP, RollCall, check_same_batch
from echelon.observability.stall.diagnose import FORWARD
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.parallel.data.local_sgd import LocalSgdAverager

CLOSED = "the engine is closed and trains no more; call distribute() for another"


class ConsistencyChecker:
    """step: the one that this rank is in, or is about to begin
    warn: told what ranks hardly mean to do
    """

    def __init__(
        self, world: World, groups: ProcessGroups, step: Callable[[], int], warn: Callable[[str], None]
    ) -> None:
        self._rank, self._step, self._warn = world.rank, step, warn
        self._data: list[Callable[[], DatasetFingerprint | None]] = []  # that ranks have not compared yet
        self._replica: int | None = None  # known with the plan
        self.is_fed: Callable[[str], bool] = lambda call: True  #: True where the batch comes from engine.loader()
        self._groups: ProcessGroups | None = groups  # None when closed
        limit = timedelta(seconds=world.timeout)
        self._roll = RollCall(partial(groups.new, None, "gloo", limit) if world.control is not None else None)
        self._local: LocalSgdAverager | None = None  # ranks step alone, and answer the roll when they meet
        self._sharers: Sequence[int] = ()  # the ranks that work on one batch together
        self._strangers: dist.ProcessGroup | None = None  # the same, until they have compared their first batches
        self._has_own_loop = False  # of the user
        self.remarks: list[str] = []  #: lines of this rank's that no rank has said yet

    @property
    def groups(self) -> ProcessGroups:
        """What makes connections, until they are let go of."""
        if self._groups is None:
            raise UsageError(CLOSED)
        return self._groups

    def meet(self) -> None:
        """Make the connections of the roll call; see there."""
        self._roll.open()
        if VERIFY not in os.environ:  # which follows DataLoaders itself
            loader_watch.open()

    def takes(self, plan: Plan, grid: MeshGroups, local: LocalSgdAverager | None) -> None:
        """Go by this plan."""
        self._replica = grid.index(*plan.data_axes)
        if plan.in_parts:
            axes = [axis for axis in ("stage", "split") if axis not in plan.data_axes]
            self._sharers, self._strangers = grid.ranks(*axes), grid.control(*axes)
        self._local = local
        if local is not None:
            local.before_meeting = lambda: self._answer("step")

    def register_dataset(self, data: Callable[[], DatasetFingerprint | None]) -> None:
        """To all ranks, in training: for the next roll call, if there is one."""
        if not self._roll.silent:
            self._data.append(data)

    def answer_roll(self, call: str, *args: Any, **named: Any) -> None:
        """In the first steps, say which call this rank is about to make; where ranks step alone, when they meet."""
        self._has_own_loop |= call in PER_STEP and call != "step"
        if self._groups is None or ((self._local or self._roll.silent) and call in PER_STEP):
            return
        sharers = self._sharers if call == "step" and self._strangers is None else ()
        which = named.get("optimizer", args[0] if args else None) if call == "update" else None
        with translate_peer_errors(self.here):
            self._answer(call, repr(which) if which else "", (args, named), sharers)

    def attend(self, layer: str, call: str = FORWARD) -> None:
        """Before this batch norm exchanges numbers: in a pass of the user's, ask whether all ranks run it.

        A rank that samples by itself would take the next step's messages for its own; Gloo aborts a process where they
        have other sizes. Loops of the user's are asked in the first steps, and later without gradients only: their
        passes are the training itself.
        """
        trains = call != FORWARD or torch.is_grad_enabled()
        if activity.call or (self._has_own_loop and self._roll.silent and trains):
            return
        with translate_peer_errors(self.here), calling(call, self._step(), call):
            self._answer(call, f"batch norm '{layer}' in training mode")

    def _answer(self, call: str, what: str = "", batch: Any = None, sharers: Sequence[int] = ()) -> None:
        data: list[DatasetFingerprint | None] = []
        if call in ("step", "update"):  # by now every rank has made its loaders
            data, self._data = [look() for look in self._data], []
        remark = self._roll.answer(call, self._step(), what, batch, sharers, data, self._fed(call, batch))
        if remark is not None:
            self._warn(remark)
        if self._roll.silent:
            loader_watch.close()

    def _fed(self, call: str, batch: Any) -> list[Any]:
        """Return what this rank tells of a batch that the script has fed it; see ``AlikeBatches``."""
        if call not in ("step", "update") or self._replica is None or self.is_fed(call):
            return []
        checksum = batch_checksum(batch) if call == "step" and batch is not None else None
        return [self._replica, checksum, loader_watch.undealt()]

    def compare(self, batch: Any) -> None:
        """Once, in the first step: ranks that work on one batch together must have been given the same."""
        if self._strangers is not None:
            group, self._strangers = self._strangers, None
            check_same_batch(batch, group, self._sharers)

    def next_meeting(self) -> int:
        """The next step that no rank can finish without all others."""
        return self._step() if self._local is None else self._local.next_meeting(self._step() - 1)

    def explained(self) -> translate_peer_errors:
        """Around what talks to other ranks."""
        if self._groups is None:
            raise UsageError(CLOSED)
        return translate_peer_errors(self.here)

    def here(self) -> str:
        return f"step {self._step()}, rank {self._rank}"

    def close(self) -> None:
        loader_watch.close()
        if self._groups is not None:
            self._groups.close()
        self._groups = None
