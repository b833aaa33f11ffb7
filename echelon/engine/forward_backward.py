"""``ForwardBackward``: a rank's forward and backward passes, from a batch to the global loss and reduced gradients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.activity import activity
from echelon.engine.replica_buffers import ReplicaBuffers
from echelon.fastpath.fast_path import EagerPass, FastPath, Forward
from echelon.observability.metrics.finite_loss import FiniteLossCheck
from echelon.parallel.data.global_loss import GlobalLoss, PiggybackSum, PipelineGlobalLoss
from echelon.parallel.evaluate import EvalOutput, evaluate_batch
from echelon.parallel.loss.loss_reduction import Count
from echelon.parallel.loss.loss_weights import EvaluationWeights, LossWeights, MicroBatchWeights, say_once
from echelon.parallel.loss.own_loop_counts import MEAN_CODE, SUM_CODE, OwnLoopCounts
from echelon.parallel.objective import scalar
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.engine.parallelize import ParallelModel
    from echelon.engine.planned_run import PlannedRun
    from echelon.parallel.pipeline.pipeline_runner import MicroBatchRunner, PipelineRunner


StepLoss = GlobalLoss | PipelineGlobalLoss


def refuse_own_loop(plan: Plan, pushes: bool) -> None:
    """Raise ``UsageError`` if the plan does not support ``engine.backward`` and ``engine.update``.

    pushes: True if gradients are pushed to servers or sparse tables
    """
    if plan.pipeline is not None:
        raise UsageError("a pipeline runs its own backward, micro-batch by micro-batch; call engine.step()")
    if pushes:
        raise UsageError("sparse tables and parameter servers are trained by engine.step(), not by backward()")
    if plan.gradient_merge > 1:
        raise UsageError("gradient_merge belongs to engine.step(); in your own loop call engine.update() less often")


@dataclass(slots=True)
class PreparedBatch:
    """A batch of this rank, on its device.

    rows:    rows of the batch; 0 for a stand-in batch
    samples: count that the loss averages over, given by the user; None if not given
    """

    inputs: Any
    rows: float
    samples: float | None


class ForwardBackward:
    """Runs forward and backward as the plan says: eagerly, on the fast path, or through a pipeline by micro-batches.

    buffers: buffers to keep equal on replicas that share every step; None without any
    forward: function from a batch to its loss
    """

    def __init__(
        self,
        planned: PlannedRun,
        parts: ParallelModel,
        fast: FastPath | None,
        buffers: ReplicaBuffers | None,
        forward: Forward,
    ) -> None:
        world, grid, rows = planned.run.world, planned.grid, planned.rows
        pushes = planned.run.backend.pushes
        self._batch_text, self._clock = planned.loaders.batch_text, planned.run.metrics.clock
        self._extras = planned.run.metrics.extras
        self._device, self._objective = world.device, planned.objective
        group = parts.group
        self.losses = FiniteLossCheck(world.rank, world.device.type == "cuda", world.control if group else None)
        self._gradients, self._scaler, self._staged = parts.gradients, parts.scaler, parts.staged
        self._group, self._fast = group, fast
        self.steps_alone = group is None  #: True if each rank has a loss of its own
        say = say_once(planned.run.say)
        op = parts.plan.reduce_op
        self._loss_weights = LossWeights(op, say, can_add=not pushes, is_global=lambda: rows.is_used)
        self._evaluation = EvaluationWeights(op, say, self._loss_weights, lambda: rows.is_used)
        # losses need weights if there are several ranks, workers, accumulated passes or micro-batches
        merges = parts.plan.gradient_merge > 1
        self._weighs = group is not None or merges or parts.staged is not None or pushes
        self._forward = forward
        self._is_last = grid.coords["stage"] == grid.size("stage") - 1
        # One of the ranks that share a batch reports its samples.
        self.contributes = self._is_last and (parts.plan.batch_per_split_rank or grid.coords["split"] == 0)
        self.has_own_loop = False  #: True if user code calls ``engine.backward``
        self.counted = True  #: True if the number of samples of the last pass is known
        self._buffers = buffers
        self._given = torch.zeros(())  # sum of the losses passed to ``add`` since ``reduce``
        self._stated_samples: list[float | None] = []  # samples of each of these losses
        self._early: tuple[frozenset[str], GlobalLoss] | None = None  # optimizers and result of ``reduce_early``
        self.has_run = False  #: True after a pass of ``engine.step``
        self._early_samples = 1.0  # weight of this rank in the last ``reduce``
        self._rows = rows
        self.own_counts = OwnLoopCounts(op, say)  #: sample counts of a loop in user code
        self._has_agreed = op != "auto"  # True once all ranks agree whether the loss is a sum
        self._replicas, self._merges = parts.plan.replicas, parts.plan.gradient_merge
        # backward of synchronized batch norm sums over replicas
        self._mixes = bool(parts.plan.sync_batch_norm) and op != "sum"

    def run(self, batch: PreparedBatch, step: int) -> StepLoss:
        """Run forward and backward; in the last accumulated pass, buckets are reduced while backward runs."""
        self._rows.begin()
        if self._staged is None:
            loss: StepLoss = self._run_whole(batch, step)
        else:
            loss = self._run_pipeline(batch, step, self._staged)
        self._clock.lap("backward")
        return loss

    def reduce(self, loss: StepLoss, batch: PreparedBatch, step: int) -> bool:
        """Check the loss; complete the reduction and return True if this was the last accumulated pass."""
        is_complete = self._gradients.after_backward(loss, step)
        self._extras.received(loss.extras)
        if is_complete:
            self._clock.lap("communicate")
        self._check(step, loss)
        if self._buffers is not None and self._buffers.is_active:
            self._buffers.after_pass(batch.rows)
        self.counted = self.has_run = True
        return is_complete

    def add(self, loss: Tensor, samples: float | None = None) -> None:
        """Run backward of this loss in a user's own loop, without communication until ``reduce``."""
        self.has_own_loop = True
        if self._early is not None:
            raise UsageError(
                "engine.backward() was called after the gradients of this update were reduced; look at them and clip "
                "them once, between the last backward() and update()"
            )
        self._stated_samples.append(samples)
        if self._stated_samples[0] != samples:
            raise UsageError(
                f"backward() was given samples={self._stated_samples[0]} and then samples={samples} for one update; "
                "losses that are added up for an update stand for the same samples"
            )
        if samples is None and self._group is not None and not self._rows.is_used:
            self.own_counts.add(scalar(loss))
        self._gradients.add_local(scalar(loss), 1.0 if samples is None else samples)
        self._given = self._given + loss.detach()

    def reduce_local(self, optimizers: Collection[str], samples: float | None, step: int) -> GlobalLoss:
        """Reduce the gradients of these optimizers; ``samples`` is the weight of this rank in the mean."""
        if self._early is not None:
            global_loss, self._early = self._reduced(optimizers, samples), None
            return global_loss
        stated = self._stated_samples[0] if self._stated_samples else None
        if None not in (stated, samples) and stated != samples:
            raise UsageError(f"update() was given samples={samples}, but backward() samples={stated}; give it to one")
        self.counted = stated is not None or samples is not None
        known = stated if stated is not None else samples
        weight, global_loss = self._own_loss(known)
        self._extras.received(global_loss.extras)
        self._early_samples = 1.0 if known is None else known
        mixes = "gather_batch() mixes gradients of all replicas" if self._rows.is_used else None
        mixes = "batch norm has statistics over all replicas" if self._mixes else mixes
        self._rows.restart()
        if mixes and stated is None and samples is not None and global_loss.samples != weight * self._replicas:
            raise UsageError(
                f"{mixes}, and their batches have different lengths: losses must be "
                "weighed before backward then; give engine.backward(loss, samples=...), not engine.update(samples=...)"
            )
        self._stated_samples = []  # cleared first, so that norms taken during the reduction are not seen as user calls
        self._gradients.reduce(optimizers, weight, global_loss, step, weighed=stated is not None)
        self._check(step, global_loss)
        if self._buffers is not None and self._buffers.is_active:
            self._buffers.after_pass(float(weight))
        self._given = torch.zeros(())
        self.own_counts.clear()
        return global_loss

    def _own_loss(self, samples: float | None) -> tuple[Count, GlobalLoss]:
        """Return the weight of this rank's losses in the mean, and that mean.

        If no ``samples`` are given, the weight is the count that the losses average over, provided that every rank
        knows it; else all ranks have equal weights.
        """
        loss, is_sum = self._given.to(self._device), self._loss_weights.is_sum
        mean = partial(GlobalLoss, loss, group=self._group, extras=self._extras.own())
        if samples is not None or self._group is None or is_sum:
            weight = 1.0 if samples is None else samples
            return weight, mean(weight, weight, is_sum)
        own = self.own_counts.known
        global_loss = mean(own.count, own.code, False)
        if global_loss.rows == self._replicas * MEAN_CODE:
            return own.count, global_loss
        return 1.0, mean(1.0, 1.0, bool(global_loss.rows == self._replicas * SUM_CODE))

    @property
    def is_local(self) -> bool:
        """True if local gradients wait for ``reduce``."""
        return bool(self._stated_samples)

    @property
    def is_waiting(self) -> bool:
        """True if gradients, reduced or not, wait for an update."""
        return self.is_local or self._early is not None

    def reduce_early(self, optimizers: Collection[str], samples: float | None, step: int) -> None:
        """Reduce the accumulated gradients before the update, which then uses them without another reduction."""
        if self._early is not None:
            self._reduced(optimizers, samples)
        elif self.is_local:
            self._early = frozenset(optimizers), self.reduce_local(optimizers, samples, step)

    def _reduced(self, optimizers: Collection[str], samples: float | None) -> GlobalLoss:
        """Return the result of ``reduce_early``. Raises ``UsageError`` if optimizers or samples differ."""
        assert self._early is not None
        known, global_loss = self._early
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
        return global_loss

    def update_loss(self, global_loss: StepLoss) -> Tensor:
        """Return the mean loss over all accumulated passes of an update, the last of which is ``global_loss``."""
        if self._merges == 1:
            return global_loss.loss
        return torch.as_tensor(self._gradients.loss, device=global_loss.local.device).to(global_loss.local.dtype)

    def evaluate(self, batch: Any) -> list[EvalOutput]:
        """Return output and loss of a batch; a pipeline has one result per micro-batch, on its last stage.

        Samples are counted on the one rank that reports the batch. The other ranks return results with 0 samples,
        because metrics of split outputs need all ranks.
        """
        self._rows.begin()
        if self._staged is not None:
            evaluated = self._staged.evaluate(batch, self._evaluation)
        else:
            evaluated = [evaluate_batch(self._objective, batch, self._evaluation)]
        return evaluated if self.contributes else [replace(each, samples=0) for each in evaluated]

    def _run_whole(self, batch: PreparedBatch, step: int) -> GlobalLoss:
        inputs, rows, samples = batch.inputs, batch.rows, batch.samples
        if activity.recorder is not None and activity.recorder.arguments is None:
            activity.recorder.note_arguments(*self._objective.arguments(inputs))
        made = EagerPass(self._forward(inputs)) if self._fast is None else self._fast.run(inputs)
        self._clock.lap("forward")
        main = self._objective.main_loss(made.loss)
        count = self._count(main, rows, samples)
        if not self._has_agreed and self._group is not None:
            self._has_agreed = True
            self._loss_weights.agree(self._group, self._device)
            count = self._count(main, rows, samples)
        extras = self._extras.own(inputs, counts=rows > 0)
        loss = GlobalLoss(made.loss, count, rows, self._loss_weights.is_sum, self._group, self._ride(count), extras)
        self._gradients.before_backward(loss, step)
        made.backward(self._gradients.weigh(count))
        return loss

    def _count(self, loss: Tensor, rows: float, samples: float | None) -> Count:
        """Return the number of samples that a loss averages over."""
        if samples is not None or not self._weighs:
            return rows if samples is None else samples
        count = self._loss_weights.count(loss, rows)
        if self._merges > 1 and self._fast is not None and not self._loss_weights.is_by_shape:
            # a captured CUDA graph computes the loss in backward, but accumulated passes need its weight before that
            self._fast.stop_graphs("with gradient_merge, the weight of a loss with ignored targets is needed earlier")
        return count

    def _ride(self, count: Count) -> PiggybackSum | None:
        return None if isinstance(count, Tensor) else self._gradients.ride

    def _run_pipeline(
        self, batch: PreparedBatch, step: int, staged: PipelineRunner | MicroBatchRunner
    ) -> PipelineGlobalLoss:
        inputs, rows, samples = batch.inputs, batch.rows, batch.samples
        expected = rows if samples is None else samples
        ahead = self._gradients.counts_first
        extras = self._extras.own(inputs, counts=self._is_last and rows > 0)
        loss = PipelineGlobalLoss(expected, rows, self._is_last, self._group, self._device, ahead, extras)
        weighing = MicroBatchWeights(self._gradients, self._loss_weights, self._objective.main_loss, rows, samples)
        self._gradients.before_backward(loss, step, staged.passes)
        if self._fast is not None:
            self._fast.count_pass()
        loss.close(staged.train(inputs, weighing))
        return loss

    def _check(self, step: int, loss: StepLoss) -> None:
        """Raise on every rank, before the update, if the global loss is not finite.

        With loss scaling, such a loss is an overflow: its gradients are not finite, and the step is skipped. With
        ``on_nonfinite`` the step is skipped or taken back.
        """
        if not (self._scaler.active or self._gradients.checks_finite):
            self.losses.note(step + 1, loss, self._batch_text())


def _names(optimizers: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(optimizers))
