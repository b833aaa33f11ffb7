"""The lines that a run logs at its start: the plan, and everything that the user may not expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from echelon.engine.device_placement import ParameterPlacement, placement_table
from echelon.engine.parallelize import ParallelModel
from echelon.engine.planned_run import PlannedRun
from echelon.engine.replica_sync import has_local_statistics
from echelon.engine.update import parameters_of
from echelon.fastpath.policy import startup_lines
from echelon.plan import Plan
from echelon.strategy.annotations.annotate import ModelMarks


def announcement(planned: PlannedRun, parts: ParallelModel | None) -> Iterator[str]:
    """Yield the lines that a run logs at its start.

    parts: None if the first batch of a pipeline has not come yet
    """
    run, plan = planned.run, planned.plan if parts is None else parts.plan
    held = parts.shards.shards if parts is not None and parts.shards else {}  # shards replace parameters
    # workers that are connected through servers only: the plan's mesh has this worker only
    separate = run.backend.describe_processes()
    processes = separate or f"{run.world.size} x {run.world.device.type} ({run.world.backend})"
    yield f"{processes}, {run.world.place.launcher}"
    yield from plan.describe().splitlines()[bool(separate) :]
    yield from startup_lines(plan.fast)
    yield from (*planned.notices, *run.metrics.notices, *run.backend.describe())
    if has_local_statistics(run.model, plan):
        remedy = "" if plan.local else "; sync_batch_norm=True gives those of one process"
        yield f"batch norm: statistics per replica (inexact){remedy}"
    yield from _left_out(run.model, held, {id(p) for p in parameters_of(run.optimizers)})


def _left_out(model: nn.Module, held: Mapping[str, Tensor], owned: Collection[int]) -> Iterator[str]:
    """Yield a line if parameters belong to no optimizer; ``owned`` has the ids of those that do."""
    trained = [(name, held.get(name, p)) for name, p in model.named_parameters() if p.requires_grad]
    left = [name for name, p in trained if id(p) not in owned]
    if left:
        yield f"{len(left)} parameters belong to no optimizer and will not be trained: {left[0]}, ..."


def placement(plan: Plan, marks: ModelMarks, ranks_per_host: int, cut: Collection[str]) -> list[str]:
    """Return the table of the devices that hold each part of the model; ``cut`` has the split parameters."""
    units, splits = plan.stages.units if plan.stages else {}, plan.splits or marks.splits
    holders = plan.stages.holders if plan.stages else {}
    held = ParameterPlacement({p.name: holders.get(p.name, ()) for p in plan.model}, cut, _shared(plan))
    shown = dataclasses.replace(marks, units=units, splits=splits)
    return placement_table(shown, plan.mesh, plan.order, ranks_per_host, held)


def _shared(plan: Plan) -> str:
    parts = plan.sharing
    if plan.shard is None or parts == 1:
        return ""
    what = {1: "optimizer state ", 2: "gradients and optimizer state ", 3: ""}[plan.shard.level]
    return f"{what}in {parts} parts (shard {plan.shard.level})"
