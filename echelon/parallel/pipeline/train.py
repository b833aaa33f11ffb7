"""Training and evaluating in micro-batches: on one process one after another, in a pipeline by its schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import DataError
from echelon.evaluate import Judged
from echelon.nn.packed import holds_packed
from echelon.objective import Objective, count_samples
from echelon.parallel.batch_norm import idle
from echelon.parallel.layout import shares
from echelon.parallel.pipeline.deferred import WeightStore, deferring
from echelon.parallel.pipeline.loop import Transfer, run_schedule
from echelon.parallel.pipeline.stage import StageRunner
from echelon.parallel.pipeline.transport import Links
from echelon.plan.schedule import Schedule, forward_only, make_schedule

if TYPE_CHECKING:
    from echelon.parallel.grid import Grid
    from echelon.plan import Plan
    from echelon.world import World


class Micro(NamedTuple):
    """Some rows of a batch, and which part of it they are. A stand-in, where rows do not suffice, is no part of it."""

    batch: Any
    part: float
    rows: int


def micro_batches(batch: Any, count: int) -> list[Micro]:
    """``batch`` in ``count`` pieces along the first dimension of its tensors, as even as they can be.

    What has another length goes to all of them. With fewer rows than pieces, the last pieces are stand-ins: the first
    row again, counting for nothing, so that all ranks of all replicas run equally many.
    """
    rows = count_samples(batch)
    if holds_packed(batch):
        raise DataError(
            "the batch holds packed sequences, which micro-batches cannot be cut from; pad them (lengths= in place of "
            "pack=), or train without stages"
        )
    return [_rows(batch, rows, begin, end) for begin, end in shares(rows, count)]


def _rows(batch: Any, rows: int, begin: int, end: int) -> Micro:
    low, high = (begin, end) if begin < end else (0, 1)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return leaf[low:high]
        return leaf

    return Micro(tree_map(cut, batch), (end - begin) / rows if rows else 0.0, end - begin)


class MicroBatches:
    """One process: micro-batches one after another, gradients adding up."""

    def __init__(self, objective: Objective, count: int) -> None:
        self._objective, self._count = objective, count

    def passes(self, name: str) -> int:
        """How many backward passes make up the gradient of a parameter."""
        return self._count

    def train(self, batch: Any, weight: Tensor | float) -> Tensor:
        """Forward and backward of the loss times ``weight``; the mean loss."""
        total: Tensor | float = 0.0
        for micro in micro_batches(batch, self._count):
            with idle(micro.part == 0):
                loss = self._objective(micro.batch)[1]
                (loss * (weight * micro.part)).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach() * micro.part
        assert isinstance(total, Tensor)
        return total

    def evaluate(self, batch: Any) -> list[Judged]:
        return [Judged(batch, *self._objective(batch), count_samples(batch))]


class Staged:
    """One rank of a pipeline: its stages, run by the plan's schedule."""

    def __init__(
        self, plan: Plan, model: nn.Module, objective: Objective, grid: Grid, hosted: Sequence[int], world: World
    ) -> None:
        assert plan.pipeline is not None
        assert plan.stages is not None
        self._count, self._hosted = plan.pipeline.micro_batches, hosted
        ranks, stages = grid.size("stage"), 1 + max(plan.stages.units.values())
        self._schedule = make_schedule(plan.pipeline.schedule, stages, ranks, self._count)
        self._judging = forward_only(stages, ranks, self._count)
        self._transfers = tuple(Transfer(t.key, t.source, t.target) for t in plan.stages.transfers)
        dynamic = plan.pipeline.dynamic_shapes
        self._links = Links(
            grid.new_group("stage"), grid.ranks("stage"), world.device, world.backend, dynamic_shapes=dynamic
        )
        defer = _Deferral if plan.pipeline.schedule == "zero-bubble" else None
        self._runner = StageRunner(model, objective, plan.stages, hosted, world.device, defer)
        self._last = stages - 1 in hosted
        self._device = world.device
        self._holders = plan.stages.holders

    def passes(self, name: str) -> int:
        return self._count * sum(stage in self._hosted for stage in self._holders[name])

    def train(self, batch: Any, weight: Tensor | float) -> Tensor:
        micros = micro_batches(batch, self._count)
        self._runner.begin([m.batch for m in micros], [weight * m.part for m in micros], training=True)
        self._run(self._schedule, micros)
        return self._loss(micros)

    def evaluate(self, batch: Any) -> list[Judged]:
        """On the last stage, what became of every micro-batch; nothing elsewhere."""
        micros = micro_batches(batch, self._count)
        self._runner.begin([m.batch for m in micros], [m.part for m in micros], training=False)
        self._run(self._judging, micros)
        losses, outputs = self._runner.losses, self._runner.outputs
        if not self._last:
            return []
        return [Judged(micro.batch, outputs[i], losses[i], micro.rows) for i, micro in enumerate(micros)]

    def _run(self, schedule: Schedule, micros: Sequence[Micro]) -> None:
        signatures = [_signature(micro.batch) for micro in micros]
        run_schedule(schedule, _Weighing(self._runner, micros), self._transfers, self._links, signatures.__getitem__)

    def _loss(self, micros: Sequence[Micro]) -> Tensor:
        """This rank's part of the mean loss: of the last stage, and auxiliary losses of all."""
        total = torch.zeros((), device=self._device)
        for known in (self._runner.losses, self._runner.auxiliary):
            for i, loss in known.items():
                total = total + loss.to(self._device) * micros[i].part
        return total


class _Weighing:
    """Runs the stages, telling batch norm which micro-batches are only stand-ins."""

    def __init__(self, runner: StageRunner, micros: Sequence[Micro]) -> None:
        self._runner, self._micros = runner, micros

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        with idle(self._micros[micro].part == 0):
            return self._runner.forward(stage, micro, received)

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: Literal["B", "I", "W"]
    ) -> Mapping[str, Tensor | None]:
        with idle(self._micros[micro].part == 0):
            return self._runner.backward(stage, micro, gradients, part)


class _Deferral:
    """Weights' gradients of one stage and micro-batch, computed when there is nothing else to do."""

    def __init__(self) -> None:
        self._store = WeightStore()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(deferring(self._store))

    def __exit__(self, *exception: Any) -> None:
        self._open.close()

    def run(self) -> None:
        self._store.run()


def _signature(batch: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(batch)
    )
