"""The lines that a run logs at its start: the plan, and everything that the user may not expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from echelon.distributed.world import World
from echelon.engine.device_placement import ParameterPlacement, placement_table
from echelon.engine.update import parameters_of
from echelon.fastpath.policy import startup_lines
from echelon.plan import Plan
from echelon.strategy.annotations.annotate import ModelMarks


def announcement(
    world: World,
    plan: Plan,
    notices: Collection[str],
    model: nn.Module,
    held: Mapping[str, Tensor],
    optimizers: Mapping[str, torch.optim.Optimizer],
    statistics: bool,
    separate: str | None = None,
) -> Iterator[str]:
    """Yield the lines that a run logs at its start.

    notices:    further lines
    held:       tensors that replace some of the model's parameters, such as shards
    statistics: True if each replica has its own batch-norm statistics
    separate:   description of the processes of a job whose workers are connected through servers only; the plan's
                mesh then has this worker only; default None
    """
    processes = separate or f"{world.size} x {world.device.type} ({world.backend})"
    yield f"{processes}, {world.place.launcher}"
    yield from plan.describe().splitlines()[bool(separate) :]
    yield from startup_lines(plan.fast)
    yield from notices
    if statistics:
        remedy = "" if plan.local else "; sync_batch_norm=True gives those of one process"
        yield f"batch norm: statistics per replica (inexact){remedy}"
    yield from _left_out(model, held, {id(p) for p in parameters_of(optimizers)})


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
    parts = plan.mesh.get("replicate", 1)
    if plan.shard is None or parts == 1:
        return ""
    what = {1: "optimizer state ", 2: "gradients and optimizer state ", 3: ""}[plan.shard.level]
    return f"{what}in {parts} parts (shard {plan.shard.level})"
