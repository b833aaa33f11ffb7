"""TrainingPasses: a rank's forward and backward, from a batch to a loss of all ranks and gradients that are reduced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.activity import activity
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.world import World
from echelon.engine.replica_buffers import ReplicaBuffers
from echelon.fastpath.fast_path import FastPath, plain_pass
from echelon.observability.metrics.finite_loss import FiniteLossCheck
from echelon.observability.metrics.step_clock import StepClock
from echelon.parallel.data.batch_rows import BatchRows
from echelon.parallel.data.global_loss import GlobalLoss, PiggybackSum, PipelineGlobalLoss
from echelon.parallel.evaluate import EvalOutput, evaluate_batch
from echelon.parallel.loss.loss_reduction import Count
from echelon.parallel.loss.loss_weights import EvaluationWeights, LossWeights, MicroBatchWeights, say_once
from echelon.parallel.loss.own_loop_counts import MEAN_CODE, SUM_CODE, OwnLoopCounts
from echelon.parallel.objective import Objective, scalar
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.engine.parallelize import ParallelModel
    from echelon.parallel.pipeline.pipeline_runner import MicroBatchRunner, PipelineRunner


def refuse_own_loop(plan: Plan, served: bool) -> None:
    """Where losses cannot be handed over one by one, with ``add`` and ``reduce``."""
    if plan.pipeline is not None:
        raise UsageError("a pipeline runs its own backward, micro-batch by micro-batch; call engine.step()")
    if served:
        raise UsageError("sparse tables and parameter servers are trained by engine.step(), not by backward()")
    if plan.gradient_merge > 1:
        raise UsageError("gradient_merge belongs to engine.step(); in your own loop call engine.update() less often")


class ForwardBackward:
    """As the plan says: at once, by the fast path, or micro-batch by micro-batch through a pipeline.

    group: who shares every step; None where ranks step alone
    """

    def __init__(
        self,
        world: World,
        grid: MeshGroups,
        parts: ParallelModel,
        objective: Objective,
        fast: FastPath | None,
        group: dist.ProcessGroup | None,
        clock: StepClock,
        rows: BatchRows,
        say: Callable[[str], None],
        served: bool,
    ) -> None:
        self._device, self._objective, self._clock = world.device, objective, clock
        self.losses = FiniteLossCheck(world.rank, on_gpu=world.device.type == "cuda")
        self.losses.group = world.control if group else None
        self._gradients, self._scaler, self._staged = parts.gradients, parts.scaler, parts.staged
        self._group, self._fast = group, fast
        say = say_once(say)
        op = parts.plan.reduce_op
        self._loss_weights = LossWeights(op, say, can_add=not served, is_global=lambda: rows.is_used)
        self._evaluation = EvaluationWeights(op, say, self._loss_weights, lambda: rows.is_used)
        # something is to be weighted: other ranks or workers, merged passes or micro-batches
        merges = parts.plan.gradient_merge > 1
        self._weighs = group is not None or merges or parts.staged is not None or served
        self._pass = plain_pass if fast is None else fast.run
        self._is_last = grid.at["stage"] == grid.size("stage") - 1
        # Of all ranks that work on one batch, one speaks for it.
        self.speaks = self._is_last and (parts.plan.spread or grid.at["split"] == 0)
        self.has_own_loop = False  #: of the user
        self.counted = True  #: whether it is known for how many samples the last pass stands
        self.buffers: ReplicaBuffers | None = None  #: of replicas that share every step
        self._given = torch.zeros(())  # sum of the losses that ``add`` was given since ``reduce``
        self._told: list[float | None] = []  # and the samples, each time
        self._early: tuple[frozenset[str], GlobalLoss] | None = (
            None  # of ``reduce_early``: which optimizers, what it found
        )
        self.has_run = False  #: a pass of ``engine.step``
        self._early_samples = 1.0  # what this rank counted for in the last ``reduce``
        self._rows = rows
        self.own_counts = OwnLoopCounts(parts.plan.reduce_op, say)  #: of a loop of the user's
        self._has_agreed = parts.plan.reduce_op != "auto"  # all ranks, on whether the loss is a sum
        self._replicas, self._merges = parts.plan.replicas, parts.plan.gradient_merge
        # backward itself adds up over replicas
        self._mixes = bool(parts.plan.sync_batch_norm) and parts.plan.reduce_op != "sum"

    def run(
        self, batch: Any, rows: float, samples: float | None, step: int, forward: Callable[[Any], Tensor]
    ) -> GlobalLoss | PipelineGlobalLoss:
        """A pass of ``step``; the last of those that are merged for an update reduces gradients too.

        rows:    of the batch; 0 for a stand-in
        samples: what its loss averages over, where the user says so
        forward: from a batch to its loss
        """
        self._rows.begin()
        if self._staged is None:
            tally: GlobalLoss | PipelineGlobalLoss = self._at_once(batch, rows, samples, step, forward)
        else:
            tally = self._by_stages(batch, rows, samples, step, self._staged)
        self._note(step, tally)
        if self.buffers is not None and self.buffers.is_active:
            self.buffers.after_pass(rows)
        self.counted = self.has_run = True
        return tally

    def add(self, loss: Tensor, samples: float | None = None) -> None:
        """For a loop of the user's own: backward of this loss, and nothing else until ``reduce``."""
        self.has_own_loop = True
        if self._early is not None:
            raise UsageError(
                "engine.backward() was called after the gradients of this update were reduced; look at them and clip "
                "them once, between the last backward() and update()"
            )
        self._told.append(samples)
        if self._told[0] != samples:
            raise UsageError(
                f"backward() was given samples={self._told[0]} and then samples={samples} for one update; losses that "
                "are added up for an update stand for the same samples"
            )
        if samples is None and self._group is not None and not self._rows.is_used:
            self.own_counts.add(scalar(loss))
        self._gradients.add_local(scalar(loss), 1.0 if samples is None else samples)
        self._given = self._given + loss.detach()

    def reduce(self, optimizers: Collection[str], samples: float | None, step: int) -> GlobalLoss:
        """What has been added, for these optimizers; this rank counts in the mean as ``samples``."""
        if self._early is not None:
            tally, self._early = self._reduced(optimizers, samples), None
            return tally
        told = self._told[0] if self._told else None
        if None not in (told, samples) and told != samples:
            raise UsageError(f"update() was given samples={samples}, but backward() samples={told}; give it to one")
        self.counted = told is not None or samples is not None
        known = told if told is not None else samples
        weight, tally = self._tally_own(known)
        self._early_samples = 1.0 if known is None else known
        mixes = "gather_batch() mixes gradients of all replicas" if self._rows.is_used else None
        mixes = "batch norm has statistics over all replicas" if self._mixes else mixes
        self._rows.is_used = False
        if mixes and told is None and samples is not None and tally.samples != weight * self._replicas:
            raise UsageError(
                f"{mixes}, and their batches have different lengths: losses must be "
                "weighed before backward then; give engine.backward(loss, samples=...), not engine.update(samples=...)"
            )
        self._told = []  # nothing waits any more: norms that are taken while gradients are reduced are our own
        self._gradients.reduce(optimizers, weight, tally, step, weighed=told is not None)
        self._note(step, tally)
        if self.buffers is not None and self.buffers.is_active:
            self.buffers.after_pass(float(weight))
        self._given = torch.zeros(())
        self.own_counts.clear()
        return tally

    def _tally_own(self, samples: float | None) -> tuple[Count, GlobalLoss]:
        """Return what this rank's losses count for in the mean, and that mean.

        Ranks that do not say it count for what their losses average over, if every one of them knows that; else alike.
        """
        loss, is_sum = self._given.to(self._device), self._loss_weights.is_sum
        if samples is not None or self._group is None or is_sum:
            weight = 1.0 if samples is None else samples
            return weight, GlobalLoss(loss, weight, weight, is_sum, self._group)
        own = self.own_counts.known
        tally = GlobalLoss(loss, own.count, own.code, False, self._group)
        if tally.rows == self._replicas * MEAN_CODE:
            return own.count, tally
        return 1.0, GlobalLoss(loss, 1.0, 1.0, bool(tally.rows == self._replicas * SUM_CODE), self._group)

    @property
    def is_local(self) -> bool:
        """Return True if gradients wait for ``reduce``: they are this rank's own."""
        return bool(self._told)

    @property
    def is_waiting(self) -> bool:
        """Return True if gradients wait for an update, reduced or not."""
        return self.is_local or self._early is not None

    def reduce_early(self, optimizers: Collection[str], samples: float | None, step: int) -> None:
        """Reduce what has been added before the update comes, which then takes it as it is."""
        if self._early is not None:
            self._reduced(optimizers, samples)
        elif self.is_local:
            self._early = frozenset(optimizers), self.reduce(optimizers, samples, step)

    def _reduced(self, optimizers: Collection[str], samples: float | None) -> GlobalLoss:
        """What ``reduce_early`` has found, if it was for these optimizers and as many samples."""
        assert self._early is not None
        known, tally = self._early
        if known != frozenset(optimizers):
            raise UsageError(
                f"gradients were reduced for {_names(known)} and are now asked for {_names(optimizers)}; call "
                "engine.reduce(), for the optimizer that update() names or for all, before gradients are clipped"
            )
        if samples is not None and samples != self._early_samples:
            raise UsageError(
                f"samples={samples} comes too late: the gradients were reduced before; give it to "
                "engine.backward(loss, samples=...)"
            )
        return tally

    def update_loss(self, tally: GlobalLoss | PipelineGlobalLoss) -> Tensor:
        """Return the loss of an update, whose last pass is ``tally``'s: the mean over all passes merged for it."""
        if self._merges == 1:
            return tally.loss
        return torch.as_tensor(self._gradients.loss, device=tally.local.device).to(tally.local.dtype)

    def judge(self, batch: Any) -> list[EvalOutput]:
        """Output and loss of a batch; of a pipeline, micro-batch by micro-batch, where the last stage is.

        It counts on the rank that speaks for it. Others have it too, since metrics of split outputs take all of them.
        """
        self._rows.begin()
        if self._staged is not None:
            judged = self._staged.evaluate(batch, self._evaluation)
        else:
            judged = [evaluate_batch(self._objective, batch, self._evaluation)]
        return judged if self.speaks else [replace(each, samples=0) for each in judged]

    def _at_once(
        self, batch: Any, rows: float, samples: float | None, step: int, forward: Callable[[Any], Tensor]
    ) -> GlobalLoss:
        if activity.recorder is not None and activity.recorder.arguments is None:
            activity.recorder.arguments = self._objective.arguments(batch)
        loss, backward = self._pass(batch, forward)
        self._clock.lap("forward")
        main = self._objective.main_loss(loss)
        count = self._count(main, rows, samples)
        if not self._has_agreed and self._group is not None:
            self._has_agreed = True
            self._loss_weights.agree(self._group, self._device)
            count = self._count(main, rows, samples)
        tally = GlobalLoss(loss, count, rows, self._loss_weights.is_sum, self._group, self._ride(count))
        self._gradients.add(lambda: backward(self._gradients.weigh(count)), tally, self._clock, step)
        return tally

    def _count(self, loss: Tensor, rows: float, samples: float | None) -> Count:
        """Return what a loss averages over."""
        if samples is not None or not self._weighs:
            return rows if samples is None else samples
        count = self._loss_weights.count(loss, rows)
        if self._merges > 1 and self._fast is not None and not self._loss_weights.is_by_shape:
            # a captured step computes its loss in backward, when merged passes must have been weighted
            self._fast.stop_graphs()
        return count

    def _ride(self, count: Count) -> PiggybackSum | None:
        return None if isinstance(count, Tensor) else self._gradients.ride

    def _by_stages(
        self, batch: Any, rows: float, samples: float | None, step: int, staged: PipelineRunner | MicroBatchRunner
    ) -> PipelineGlobalLoss:
        expected = rows if samples is None else samples
        ahead = self._gradients.counts_first
        tally = PipelineGlobalLoss(expected, rows, self._is_last, self._group, self._device, ahead)
        weighing = MicroBatchWeights(self._gradients, self._loss_weights, self._objective.main_loss, rows, samples)
        self._gradients.add(lambda: tally.close(staged.train(batch, weighing)), tally, self._clock, step, staged.passes)
        return tally

    def _note(self, step: int, tally: GlobalLoss | PipelineGlobalLoss) -> None:
        """Raise on every rank, before the update, when the global loss is not finite.

        With a loss scale that is an overflow like others: its gradients are not finite, and the step is skipped.
        """
        if not self._scaler.active:
            self.losses.note(step + 1, tally)


def _names(optimizers: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(optimizers))
