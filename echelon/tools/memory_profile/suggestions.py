"""Suggest jobs that need less memory: one change each, or the reason why the change is not possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch.optim import Adam, AdamW

from echelon.base.errors import UsageError
from echelon.plan import Plan
from echelon.strategy import LowMemory, Shard
from echelon.strategy.combine import refuse_conflicts
from echelon.tools.memory_profile.training_job import Optimizers, TrainingJob


def alternatives(job: TrainingJob, plan: Plan, optimizers: Optimizers) -> Iterator[tuple[str, TrainingJob | str]]:
    """Yield (change, job with that change), or (change, reason why it is not possible)."""
    for what, change in _changes(plan, optimizers).items():
        try:
            other = job.replaced(**change)
            refuse_conflicts(other.strategy, _marked(plan))
        except UsageError as error:
            yield what, str(error).partition("; ")[0]
        else:
            yield what, other
    if job.samples > 1:
        yield f"batch {job.samples // 2}", dataclasses.replace(job, samples=job.samples // 2)


def _changes(plan: Plan, optimizers: Optimizers) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    if not plan.recompute and not plan.recompute_chains:
        found["recompute"] = {"recompute": True}
    if plan.amp is None:
        found["amp bf16"] = {"amp": "bf16"}
    level = plan.shard.level if plan.shard else 0
    for higher in range(level + 1, 4) if plan.mesh["replicate"] > 1 else ():
        found[f"shard {higher}"] = {"shard": Shard(level=higher)}  # type: ignore[arg-type]
    if plan.low_memory is None and all(type(each) in (Adam, AdamW) for each in optimizers.values()):
        found["low_memory"] = {
            "low_memory": LowMemory(),
            "amp": None if plan.amp is None or plan.amp.dtype == "bf16" else plan.amp,
        }
    return found


def _marked(plan: Plan) -> list[str]:
    return [name for name, there in (("split", plan.splits), ("pipeline", plan.pipeline)) if there]
