"""``ConsistencyChecker``: an engine's process groups, and the checks that all ranks do the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

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
from echelon.engine.progress import RunProgress
from echelon.observability.stall.diagnose import FORWARD
from echelon.plan import Plan

CLOSED = "the engine is closed and trains no more; call distribute() for another"


class BatchChecks:
    """The batches of a plan: which ranks share one, and the checks of it on this rank.

    replica: index of this rank's batch
    is_fed:  function from a call to True if its batch comes from ``engine.loader``
    """

    def __init__(self, plan: Plan, grid: MeshGroups, replica: int, is_fed: Callable[[str], bool]) -> None:
        self._replica, self._is_fed = replica, is_fed
        self.steps_alone = plan.local is not None  #: True if ranks compare calls only when they average
        self._sharers: Sequence[int] = ()  # the ranks that share one batch
        self._sharing_group: dist.ProcessGroup | None = (
            None  # group of these ranks, until the first batches are compared
        )
        if plan.is_model_parallel:
            axes = [axis for axis in ("stage", "split") if axis not in plan.data_axes]
            self._sharers, self._sharing_group = grid.ranks(*axes), grid.control(*axes)

    def compare(self, batch: Any) -> None:
        """Check once, in the first step, that the ranks that share one batch were given the same batch."""
        if self._sharing_group is not None:
            group, self._sharing_group = self._sharing_group, None
            check_same_batch(batch, group, self._sharers)

    def sharers(self, call: str) -> Sequence[int]:
        """Return the ranks whose batches for this call must have the same shapes."""
        return self._sharers if call == "step" and self._sharing_group is None else ()

    def fed(self, call: str, batch: Any) -> list[Any]:
        """Return this rank's description of a batch that the script itself has fed (see ``DuplicateBatchCheck``)."""
        if call not in ("step", "update") or self._is_fed(call):
            return []
        checksum = batch_checksum(batch) if call == "step" and batch is not None else None
        return [self._replica, checksum, loader_watch.undealt()]


class ConsistencyChecker:
    """Checks that all ranks make the same calls on matching data, and owns the engine's process groups.

    warn: callback for legal but suspicious differences between ranks
    """

    def __init__(self, world: World, groups: ProcessGroups, progress: RunProgress, warn: Callable[[str], None]) -> None:
        self._rank, self._progress, self._warn = world.rank, progress, warn
        self._data: list[Callable[[], DatasetFingerprint | None]] = []  # datasets that were not compared yet
        self._groups: ProcessGroups | None = groups  # None after close
        limit = timedelta(seconds=world.timeout)
        self._roll = RollCall(partial(groups.new, None, "gloo", limit) if world.control is not None else None)
        self._has_own_loop = False  # True if user code calls backward and update
        self.remarks: list[str] = []  #: warnings of this rank that were not logged yet

    @property
    def groups(self) -> ProcessGroups:
        """The process groups of the engine. Raises ``UsageError`` after ``close``."""
        if self._groups is None:
            raise UsageError(CLOSED)
        return self._groups

    def open(self) -> None:
        """Create the process group of the roll call on all ranks (see ``RollCall.open``)."""
        self._roll.open()
        if VERIFY not in os.environ:  # 'echelon verify' tracks DataLoaders itself
            loader_watch.open()

    def register_dataset(self, data: Callable[[], DatasetFingerprint | None]) -> None:
        """Register a training dataset for comparison in the next roll call, if there is one."""
        if not self._roll.silent:
            self._data.append(data)

    def answer_roll(
        self, call: str, batches: BatchChecks | None, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> None:
        """Compare the next call of all ranks; per-step calls only in the first steps, and under local SGD only when
        ranks average.

        batches: checks of the plan; None before it is known
        """
        self._has_own_loop |= call in PER_STEP and call != "step"
        if self._groups is None or (call in PER_STEP and self._passes_over(batches)):
            return
        named = named or {}
        which = named.get("optimizer", args[0] if args else None) if call == "update" else None
        with translate_peer_errors(self.here):
            self._answer(call, repr(which) if which else "", (args, named), batches)

    def _passes_over(self, batches: BatchChecks | None) -> bool:
        """Return True if calls of a step are not compared: after the first steps, or if ranks step alone."""
        return self._roll.silent or (batches is not None and batches.steps_alone)

    def answer_sync(self, batches: BatchChecks) -> None:
        """Compare the call before ranks that step alone average their weights."""
        self._answer("step", batches=batches)

    def check_norm(self, layer: str, call: str = FORWARD) -> None:
        """Check that all ranks run this batch norm before it communicates in a forward pass of user code.

        A rank that runs the model alone would receive the messages of the next step. Gloo aborts a process if their
        sizes differ. If user code has its own training loop, passes with gradients are checked in the first steps
        only, because they are the training itself; passes without gradients are always checked.
        """
        trains = call != FORWARD or torch.is_grad_enabled()
        if activity.call or (self._has_own_loop and self._roll.silent and trains):
            return
        with translate_peer_errors(self.here), calling(call, self.step, call):
            self._answer(call, f"batch norm '{layer}' in training mode")

    def _answer(self, call: str, what: str = "", batch: Any = None, batches: BatchChecks | None = None) -> None:
        data: list[DatasetFingerprint | None] = []
        if call in ("step", "update"):  # by now every rank has created its loaders
            data, self._data = [look() for look in self._data], []
        sharers, fed = (batches.sharers(call), batches.fed(call, batch)) if batches is not None else ((), [])
        sharers = sharers if batch is not None else ()
        remark = self._roll.answer(call, self.step, what, batch, sharers, data, fed)
        if remark is not None:
            self._warn(remark)
        if self._roll.silent:
            loader_watch.close()

    @property
    def step(self) -> int:
        """The step that this rank is in or is about to begin."""
        return self._progress.steps + 1

    def explained(self) -> translate_peer_errors:
        """Return the context for communication with other ranks: it converts errors of lost peers."""
        if self._groups is None:
            raise UsageError(CLOSED)
        return translate_peer_errors(self.here)

    def here(self) -> str:
        return f"step {self.step}, rank {self._rank}"

    def close(self) -> None:
        loader_watch.close()
        if self._groups is not None:
            self._groups.close()
        self._groups = None
