"""Conversion of a Draft to a Plan. ``make_plan`` makes the Plan, from marks and a Strategy made here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.plan import Plan, make_plan
from echelon.plan.draft import Draft
from echelon.plan.saved_plan import SavedPlan
from echelon.strategy import Dgc, LocalSgd, Shard, Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Pipeline
from echelon.strategy.annotations.slices import Slices

if TYPE_CHECKING:
    pass


class RunnablePlan(NamedTuple):
    """The plan and marks that an engine needs to run a draft."""

    plan: Plan
    marks: ModelMarks


class SavedPlanInputs(NamedTuple):
    """A saved plan as the arguments of ``make_plan``, as if the user had written them."""

    strategy: Strategy
    marks: ModelMarks
    slices: Slices
    mesh: dict[str, int]


def saved_plan_inputs(saved: SavedPlan) -> SavedPlanInputs:
    draft = saved.draft
    _check_shape(draft)
    mesh = {"replicate": draft.replicate, "stage": draft.stage, "split": draft.split}
    mesh = {axis: size for axis, size in mesh.items() if size > 1 or axis == "replicate"}
    return SavedPlanInputs(_strategy(draft), _marks(saved), _slices(draft), mesh)


def realize(
    saved: SavedPlan,
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    ranks: int,
    ranks_per_host: int = 1,
) -> RunnablePlan:
    """Return the Plan of a saved draft for this model, with its marks.

    Raises UsageError if the draft is for another number of ranks.
    """
    draft = saved.draft
    if draft.ranks != ranks:
        raise UsageError(
            f"the plan is for {draft.ranks} ranks ({draft}), this job has {ranks}; start it with {draft.ranks}, or "
            f"make a plan for {ranks}"
        )
    strategy, marks, slices, mesh = saved_plan_inputs(saved)
    plan = make_plan(model, optimizers, strategy, ranks, ranks_per_host, marks, slices, mesh)
    return RunnablePlan(complete_saved_plan(plan, saved, model), marks)


def complete_saved_plan(plan: Plan, saved: SavedPlan, model: nn.Module) -> Plan:
    """Return the plan with the draft's recompute by stage and shares by replica."""
    recomputed = tuple((name,) for name in _recomputed(saved, model))
    return dataclasses.replace(plan, recompute=recomputed, shares=_shares(saved.draft))


def _check_shape(draft: Draft) -> None:
    if draft.chunks > 1 and (draft.stage == 1 or draft.schedule != "interleaved"):
        raise UsageError(f"{draft}: several stages a rank need two ranks or more and schedule='interleaved'")
    if draft.compile and draft.stage > 1:
        raise UsageError(f"{draft}: stages send the outputs of units, and cannot be compiled; leave compile out")
    if draft.order and sorted(draft.order) != list(range(draft.ranks)):
        raise UsageError(f"{draft}: order lists each of the {draft.ranks} ranks once, got {draft.order}")


def _marks(saved: SavedPlan) -> ModelMarks:
    draft = saved.draft
    widths = draft.widths or None
    splits = {name: dataclasses.replace(mark, weights=widths) for name, mark in saved.splits.items()}
    return ModelMarks(
        units=dict(_stages(saved)) if draft.stage > 1 else {},
        splits=splits if draft.split > 1 else {},
        replicates=(),
        pipeline=_pipeline(draft),
        default=None,
    )


def _stages(saved: SavedPlan) -> Iterator[tuple[str, int]]:
    """Yield the name of every module of every unit, with its stage."""
    for at, names in enumerate(saved.units):
        stage = sum(at >= cut for cut in saved.draft.cuts)
        yield from ((name, stage) for name in names)


def _pipeline(draft: Draft) -> Pipeline | None:
    """Return the Pipeline of a draft; with one stage, micro-batches run in sequence. None without micro-batches."""
    if draft.stage > 1:
        return Pipeline(micro_batches=draft.micro_batches, schedule=draft.schedule or "1f1b")
    return Pipeline(micro_batches=draft.micro_batches, stages=1) if draft.micro_batches > 1 else None


def _strategy(draft: Draft) -> Strategy:
    return Strategy(
        amp=draft.amp,
        shard=Shard(level=draft.shard, within=draft.within or None) if draft.shard else None,  # type: ignore[arg-type]
        fp16_allreduce=draft.comm_dtype,
        dgc=Dgc() if draft.approximate == "dgc" else None,
        localsgd=LocalSgd() if draft.approximate == "localsgd" else None,
    )


def _slices(draft: Draft) -> Slices:
    size = draft.stage * draft.split
    if not draft.order:
        return Slices(average=size)
    return Slices(specific=tuple(draft.order[at : at + size] for at in range(0, draft.ranks, size)))


def _shares(draft: Draft) -> tuple[float, ...]:
    return draft.shares if len(set(draft.shares)) > 1 else ()


def _recomputed(saved: SavedPlan, model: nn.Module) -> Iterator[str]:
    """Yield the modules to recompute, each on its own.

    A module that modifies its input in place is left out: its input no longer exists in backward, and it saves nothing.
    """
    recompute = saved.draft.recompute or (False,) * saved.draft.stages
    for name, stage in _stages(saved):
        if recompute[stage] and not getattr(model.get_submodule(name), "inplace", False):
            yield name
