"""Train and evaluate in micro-batches: one after another on one process, or by a schedule in a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.base.errors import DataError
from echelon.distributed.tensor_layout import shares
from echelon.nn.packed import holds_packed
from echelon.parallel.data.batch_norm import stand_in_batch
from echelon.parallel.data.global_loss import PipelineLocalLoss
from echelon.parallel.evaluate import EvalOutput, evaluate_batch
from echelon.parallel.loss.loss_reduction import Count, times_count
from echelon.parallel.loss.loss_weights import EvaluationWeights, MicroBatchWeights
from echelon.parallel.objective import Objective, count_samples
from echelon.parallel.pipeline.schedule_loop import StageTransfer, run_schedule
from echelon.parallel.pipeline.split_backward import WeightGradStore, defer_weight_grads
from echelon.parallel.pipeline.stage_runner import StageRunner
from echelon.parallel.pipeline.transport import PipelineLinks
from echelon.plan.schedule import Schedule, forward_only, make_schedule

if TYPE_CHECKING:
    from echelon.distributed.mesh_groups import MeshGroups
    from echelon.distributed.world import World
    from echelon.plan import Plan


class MicroBatch(NamedTuple):
    """Some rows of a batch.

    batch:  the rows
    part:   their fraction of the whole batch; 0 for a stand-in
    rows:   number of rows; 0 for a stand-in
    """

    batch: Any
    part: float
    rows: int


def micro_batches(batch: Any, count: int) -> list[MicroBatch]:
    """Cut ``batch`` into ``count`` pieces along the first dimension of its tensors, as evenly as possible.

    Tensors of another length go to all pieces. With fewer rows than pieces, the last pieces are stand-ins: the first
    row again with weight 0, so that all ranks of all replicas run the same number.

    Raises DataError for packed sequences.
    """
    rows = count_samples(batch)
    if holds_packed(batch):
        raise DataError(
            "the batch holds packed sequences, which micro-batches cannot be cut from; pad them (lengths= in place of "
            "pack=), or train without stages"
        )
    return [_rows(batch, rows, begin, end) for begin, end in shares(rows, count)]


def _rows(batch: Any, rows: int, begin: int, end: int) -> MicroBatch:
    low, high = (begin, end) if begin < end else (0, 1)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return leaf[low:high]
        return leaf

    return MicroBatch(tree_map(cut, batch), (end - begin) / rows if rows else 0.0, end - begin)


class MicroBatchRunner:
    """Runs micro-batches one after another on one process, and accumulates their gradients."""

    def __init__(self, objective: Objective, count: int) -> None:
        self._objective, self._count = objective, count

    def passes(self, name: str) -> int:
        """Return the number of backward passes that contribute to the gradient of a parameter."""
        return self._count

    def train(self, batch: Any, weights: MicroBatchWeights) -> PipelineLocalLoss:
        """Run forward and backward of each micro-batch's weighted loss."""
        known = _WeightedLosses(micro_batches(batch, self._count), weights)
        for at, micro in enumerate(known.micros):
            with stand_in_batch(micro.part == 0):
                loss = self._objective(micro.batch)[1]
                (loss * known.of_loss(at, loss)).backward()  # type: ignore[no-untyped-call]
        return known.result({}, loss.device)

    def evaluate(self, batch: Any, weights: EvaluationWeights) -> list[EvalOutput]:
        return [evaluate_batch(self._objective, batch, weights)]


class PipelineRunner:
    """Runs the stages of one rank of a pipeline by the plan's schedule."""

    def __init__(
        self, plan: Plan, model: nn.Module, objective: Objective, grid: MeshGroups, hosted: Sequence[int], world: World
    ) -> None:
        assert plan.pipeline is not None
        assert plan.stages is not None
        self._count, self._hosted = plan.pipeline.micro_batches, hosted
        ranks, stages = grid.size("stage"), 1 + max(plan.stages.units.values())
        self._schedule = make_schedule(plan.pipeline.schedule, stages, ranks, self._count)
        self._judging = forward_only(stages, ranks, self._count)
        self._transfers = tuple(StageTransfer(t.key, t.source, t.target) for t in plan.stages.transfers)
        dynamic = plan.pipeline.dynamic_shapes
        self._links = PipelineLinks(
            grid.new_group("stage"), grid.ranks("stage"), world.device, world.backend, dynamic_shapes=dynamic
        )
        defer = _Deferral if plan.pipeline.schedule == "zero-bubble" else None
        self._runner = StageRunner(model, objective, plan.stages, hosted, world.device, defer)
        self._last = stages - 1 in hosted
        self._device = world.device
        self._holders = plan.stages.holders

    def passes(self, name: str) -> int:
        return self._count * sum(stage in self._hosted for stage in self._holders[name])

    def train(self, batch: Any, weights: MicroBatchWeights) -> PipelineLocalLoss:
        known = _WeightedLosses(micro_batches(batch, self._count), weights)
        self._runner.begin([m.batch for m in known.micros], known)
        self._run(self._schedule, known.micros)
        return known.result(self._runner.auxiliary, self._device)

    def evaluate(self, batch: Any, weights: EvaluationWeights) -> list[EvalOutput]:
        """Return the outputs and losses of all micro-batches on the rank of the last stage; elsewhere an empty list."""
        micros = micro_batches(batch, self._count)
        self._runner.begin([m.batch for m in micros], None)
        self._run(self._judging, micros)
        losses, outputs, seen = self._runner.losses, self._runner.outputs, self._runner.seen
        if not self._last:
            return []
        counts = [weights.count(seen[i], micro.rows) for i, micro in enumerate(micros)]
        return [
            EvalOutput(micro.batch, outputs[i], losses[i], micro.rows, counts[i], weights.is_sum)
            for i, micro in enumerate(micros)
        ]

    def _run(self, schedule: Schedule, micros: Sequence[MicroBatch]) -> None:
        signatures = [_signature(micro.batch) for micro in micros]
        run_schedule(
            schedule, _StandInAwareRunner(self._runner, micros), self._transfers, self._links, signatures.__getitem__
        )


class _WeightedLosses:
    """The running sum of the losses of one batch's micro-batches."""

    def __init__(self, micros: Sequence[MicroBatch], weights: MicroBatchWeights) -> None:
        self.micros, self._weights = micros, weights
        self._total: Tensor | float = 0.0
        self._count: Count = 0.0

    def of_loss(self, micro: int, loss: Tensor) -> Count:
        at = self.micros[micro]
        weight, count = self._weights.of_loss(loss, at.rows, at.part)
        self._total = self._total + times_count(loss, count)
        self._count = self._count + count
        return weight

    def of_auxiliary(self, micro: int) -> Count:
        return self._weights.of_auxiliary(self.micros[micro].part)

    def result(self, auxiliary: Mapping[int, Tensor], device: torch.device) -> PipelineLocalLoss:
        """Return this rank's part of the loss; ``auxiliary`` are the losses of its modules."""
        total, extra = torch.zeros((), device=device) + self._total, torch.zeros((), device=device)
        for micro, loss in auxiliary.items():
            extra = extra + loss.to(device) * self.micros[micro].part
        return PipelineLocalLoss(total, self._count, self._weights.rows, extra, self._weights.is_sum)


class _StandInAwareRunner:
    """Runs the stages, and marks stand-in micro-batches so that batch norm does not count them."""

    def __init__(self, runner: StageRunner, micros: Sequence[MicroBatch]) -> None:
        self._runner, self._micros = runner, micros

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        with stand_in_batch(self._micros[micro].part == 0):
            return self._runner.forward(stage, micro, received)

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: Literal["B", "I", "W"]
    ) -> Mapping[str, Tensor | None]:
        with stand_in_batch(self._micros[micro].part == 0):
            return self._runner.backward(stage, micro, gradients, part)


class _Deferral:
    """Defers the gradients of weights of one stage and micro-batch to ``run``, the W action of the schedule."""

    def __init__(self) -> None:
        self._store = WeightGradStore()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(defer_weight_grads(self._store))

    def __exit__(self, *exception: Any) -> None:
        self._open.close()

    def run(self) -> None:
        self._store.run()


def _signature(batch: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(batch)
    )
