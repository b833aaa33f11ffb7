"""Conversion of a Plan into a Draft, so that predictions exist for plans that were not made by the search."""

from __future__ import annotations

from echelon.base.errors import UsageError
from echelon.plan.draft import Approximation, Draft
from echelon.plan.plan import Plan
from echelon.plan.stage_trace import StageTrace
from echelon.planner.model_costs import ProfileLike


def draft_of(plan: Plan, profile: ProfileLike) -> Draft:
    """Return the draft that describes the plan; ``profile.batch`` is used as the global batch."""
    depth = plan.mesh.get("stage", 1)
    cuts = _cuts(plan, profile)
    stages = len(cuts) + 1
    pipeline = plan.pipeline
    recomputed = bool(plan.recompute or plan.recompute_chains)
    approximate: Approximation | None = "dgc" if plan.dgc else "localsgd" if plan.local else None
    return Draft(
        batch=profile.batch,
        replicate=plan.replicas,
        stage=depth,
        split=1 if plan.batch_per_split_rank else plan.mesh.get("split", 1),
        chunks=max(1, stages // depth),
        cuts=cuts,
        micro_batches=(pipeline.micro_batches if pipeline else 1) * plan.gradient_merge,
        schedule=pipeline.schedule if pipeline and stages > 1 else None,
        recompute=(recomputed,) * stages if recomputed else (),
        shard=plan.shard.level if plan.shard else 0,
        amp=plan.amp.dtype if plan.amp else None,
        comm_dtype="bf16" if plan.comm_dtype == "bf16" else "fp16" if plan.comm_dtype else None,
        approximate=approximate,
        shares=plan.shares,
        order=plan.order,
    )


def _cuts(plan: Plan, profile: ProfileLike) -> tuple[int, ...]:
    """Return the index of the first unit of every stage but the first."""
    if plan.stages is None:
        return _even_cuts(plan.mesh.get("stage", 1), len(profile.names))
    stages = [_stage_of(name, plan.stages) for name in profile.names]
    cuts: list[int] = []
    before = 0
    for unit, stage in enumerate(stages):
        if stage is not None and stage > before:
            cuts.append(unit)
            before = stage
    if len(cuts) + 1 != plan.stages.stages:
        raise UsageError(
            f"the plan has {plan.stages.stages} stages, but {len(cuts) + 1} among the units of {profile.name}: "
            "profile the model that the plan was made for"
        )
    return tuple(cuts)


def _stage_of(unit: str, recorded: StageTrace) -> int | None:
    """Return the stage of the marked module that is this unit, contains it, or is contained in it; None without one."""
    for name, stage in recorded.units.items():
        if name == unit or unit.startswith(f"{name}.") or name.startswith(f"{unit}."):
            return stage
    return None


def _even_cuts(stages: int, units: int) -> tuple[int, ...]:
    return tuple(round(stage * units / stages) for stage in range(1, stages))
