"""TrainingPasses: a rank's forward and backward, from a batch to a loss of all ranks and gradients that are reduced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.errors import UsageError
from echelon.evaluate import Judged
from echelon.fast.path import FastPath, plain_pass
from echelon.objective import Objective, count_samples, scalar
from echelon.parallel.grid import Grid
from echelon.parallel.tally import StagedTally, Tally
from echelon.plan import Plan
from echelon.watch.activity import activity
from echelon.watch.clock import Clock
from echelon.watch.losses import Losses
from echelon.world import World

if TYPE_CHECKING:
    from echelon.assembly import Parts
    from echelon.parallel.pipeline.train import MicroBatches, Staged


def refuse_own_loop(plan: Plan, served: bool) -> None:
    """Where losses cannot be handed over one by one, with ``add`` and ``reduce``."""
    if plan.pipeline is not None:
        raise UsageError("a pipeline runs its own backward, micro-batch by micro-batch; call engine.step()")
    if served:
        raise UsageError("sparse tables and parameter servers are trained by engine.step(), not by backward()")
    if plan.gradient_merge > 1:
        raise UsageError("gradient_merge belongs to engine.step(); in your own loop call engine.update() less often")


class TrainingPasses:
    """As the plan says: at once, by the fast path, or micro-batch by micro-batch through a pipeline.

    group: who shares every step; None where ranks step alone
    """

    def __init__(
        self,
        world: World,
        grid: Grid,
        parts: Parts,
        objective: Objective,
        fast: FastPath | None,
        group: dist.ProcessGroup | None,
        clock: Clock,
    ) -> None:
        self._device, self._objective, self._clock = world.device, objective, clock
        self.losses = Losses(world.rank, on_gpu=world.device.type == "cuda")
        self.losses.group = world.control if group else None
        self._gradients, self._scaler, self._staged = parts.gradients, parts.scaler, parts.staged
        self._group, self._op = group, parts.plan.reduce_op
        self._pass = plain_pass if fast is None else fast.run
        self._is_last = grid.at["stage"] == grid.size("stage") - 1
        # Of all ranks that work on one batch, one speaks for it.
        self.speaks = self._is_last and (parts.plan.spread or grid.at["split"] == 0)
        self.has_own_loop = False  #: of the user
        self.counted = True  #: whether it is known for how many samples the last pass stands
        self._given = torch.zeros(())  # sum of the losses that ``add`` was given since ``reduce``
        self._told: list[float | None] = []  # and the samples, each time
        self._replicas = parts.plan.replicas
        self._mixes = bool(parts.plan.sync_batch_norm) and self._op != "sum"  # backward itself adds up over replicas

    def run(self, batch: Any, count: float, step: int, forward: Callable[[Any], Tensor]) -> Tally | StagedTally:
        """A pass of ``step``; the last of those that are merged for an update reduces gradients too.

        count:   of the batch's samples
        forward: from a batch to its loss
        """
        if self._staged is None:
            tally: Tally | StagedTally = self._at_once(batch, count, step, forward)
        else:
            tally = self._by_stages(batch, count, step, self._staged)
        self._note(step, tally)
        self.counted = True
        return tally

    def add(self, loss: Tensor, samples: float | None = None) -> None:
        """For a loop of the user's own: backward of this loss, and nothing else until ``reduce``."""
        self.has_own_loop = True
        self._told.append(samples)
        if self._told[0] != samples:
            raise UsageError(
                f"backward() was given samples={self._told[0]} and then samples={samples} for one update; losses that "
                "are added up for an update stand for the same samples"
            )
        self._gradients.add_local(scalar(loss), 1.0 if samples is None else samples)
        self._given = self._given + loss.detach()

    def reduce(self, optimizers: Collection[str], samples: float | None, step: int) -> Tally:
        """What has been added, for these optimizers; this rank counts in the mean as ``samples``."""
        told = self._told[0] if self._told else None
        if None not in (told, samples) and told != samples:
            raise UsageError(f"update() was given samples={samples}, but backward() samples={told}; give it to one")
        self.counted = told is not None or samples is not None
        weight = next((known for known in (told, samples) if known is not None), 1.0)
        tally = Tally(self._given.to(self._device), weight, self._op, self._group)
        if self._mixes and told is None and samples is not None and tally.samples != weight * self._replicas:
            raise UsageError(
                "batch norm has statistics over all replicas, and their batches have different lengths: losses must be "
                "weighed before backward then; give engine.backward(loss, samples=...), not engine.update(samples=...)"
            )
        self._gradients.reduce(optimizers, weight, tally, step, weighed=told is not None)
        self._note(step, tally)
        self._given, self._told = torch.zeros(()), []
        return tally

    def judge(self, batch: Any) -> list[Judged]:
        """Output and loss of a batch; of a pipeline, micro-batch by micro-batch, where the last stage is.

        It counts on the rank that speaks for it. Others have it too, since metrics of split outputs take all of them.
        """
        if self._staged is not None:
            judged = self._staged.evaluate(batch)
        else:
            judged = [Judged(batch, *self._objective(batch), count_samples(batch))]
        return judged if self.speaks else [each._replace(samples=0) for each in judged]

    def _at_once(self, batch: Any, count: float, step: int, forward: Callable[[Any], Tensor]) -> Tally:
        if activity.recorder is not None and activity.recorder.arguments is None:
            activity.recorder.arguments = self._objective.arguments(batch)
        loss, backward = self._pass(batch, forward)
        self._clock.lap("forward")
        tally = Tally(loss, count, self._op, self._group, self._gradients.ride)
        self._gradients.add(backward, count, tally, self._clock, step)
        return tally

    def _by_stages(self, batch: Any, count: float, step: int, staged: Staged | MicroBatches) -> StagedTally:
        late = not self._gradients.counts_first
        tally = StagedTally(count, self._is_last, self._op, self._group, self._device, late)

        def train(weight: Tensor | float) -> None:
            tally.close(staged.train(batch, weight))

        self._gradients.add(train, count, tally, self._clock, step, staged.passes)
        return tally

    def _note(self, step: int, tally: Tally | StagedTally) -> None:
        """Raise on every rank, before the update, when the global loss is not finite.

        With a loss scale that is an overflow like others: its gradients are not finite, and the step is skipped.
        """
        if not self._scaler.active:
            self.losses.note(step + 1, tally)
