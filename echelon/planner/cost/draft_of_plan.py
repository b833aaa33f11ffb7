"""Conversion of a Plan into a Draft, so that predictions exist for plans that were not made by the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.plan import Plan
from echelon.planner.model_costs import ProfileLike
from echelon.strategy.annotations.marks import Split, within


def draft_of(plan: Plan, profile: ProfileLike, batch: int | None = None) -> Draft:
    """Return the draft that describes a Plan; a draft has neither gradient_merge nor low_memory.

    batch: samples of the global batch; default: those of the profiled batch
    """
    stages = _stages_of(plan, profile)
    count = max(stages, default=0) + 1
    mesh = plan.mesh
    return Draft(
        batch=batch or profile.batch,
        replicate=mesh["replicate"],
        stage=mesh.get("stage", 1),
        split=mesh.get("split", 1),
        chunks=count // mesh.get("stage", 1),
        cuts=tuple(stages.index(stage) for stage in range(1, count)),
        micro_batches=plan.pipeline.micro_batches if plan.pipeline else 1,
        schedule=plan.pipeline.schedule if plan.pipeline and mesh.get("stage", 1) > 1 else None,
        recompute=_recompute_of(plan, profile.names, stages),
        shard=plan.shard.level if plan.shard else 0,
        within=plan.shard.within if plan.shard and isinstance(plan.shard.within, int) else 0,
        amp=plan.amp.dtype if plan.amp else None,
        comm_dtype=plan.comm_dtype,  # type: ignore[arg-type]
        approximate="dgc" if plan.dgc else "localsgd" if plan.local else None,
        shares=plan.shares,
        widths=_widths(plan.splits),
        order=plan.order,
        compile=bool(plan.fast.compiled),
    )


def stepping_optimizer(plan: Plan, given: str) -> str:
    """Return the name of the optimizer that takes the steps; LARS or LAMB may replace the given one."""
    return "lamb" if plan.lamb else "lars" if plan.lars else given


def _stages_of(plan: Plan, profile: ProfileLike) -> list[int]:
    """Return the stage of every unit. Raises UsageError if the plan's stages do not consist of the profile's units."""
    if plan.mesh.get("stage", 1) == 1:
        return [0] * len(profile.names)
    if plan.stages is None:  # the first batch will cut the pipeline
        depth, units = plan.mesh["stage"], len(profile.names)
        return [sum(at >= round(stage * units / depth) for stage in range(1, depth)) for at in range(units)]
    known = plan.stages.units
    found = [_stage_of(name, known) for name in profile.names]
    stages = [0 if stage is None else stage for stage in found]
    for at, stage in enumerate(found):  # a unit without a stage runs where it is used: in the stage of the next unit
        if stage is None:
            later = (other for other in found[at:] if other is not None)
            stages[at] = next(later, max(known.values()))
    if stages != sorted(stages) or set(stages) != set(known.values()):
        raise UsageError("the plan's stages are not made of the profile's units; give a Draft with cuts")
    return stages


def _stage_of(name: str, known: Mapping[str, int]) -> int | None:
    return next((stage for unit, stage in known.items() if within(name, unit) or within(unit, name)), None)


def _recompute_of(plan: Plan, names: Sequence[str], stages: Sequence[int]) -> tuple[bool, ...]:
    if not plan.recompute and not plan.recompute_chains:
        return ()
    covered = [name for segment in plan.recompute for name in segment] + list(plan.recompute_chains)

    def is_recomputed(name: str) -> bool:
        return any(within(name, other) or within(other, name) for other in covered)

    by_stage = [[is_recomputed(name) for name, at in zip(names, stages, strict=True) if at == s] for s in set(stages)]
    return tuple(2 * sum(flags) > len(flags) for flags in by_stage)


def _widths(splits: Mapping[str, Split]) -> tuple[float, ...]:
    return next((mark.weights for mark in splits.values() if mark.weights), ())
