"""Describe a job in one line of text: ``8 samples on each of 4 processes, recompute, amp bf16, shard 1``."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.base.formatting import things
from echelon.plan import Plan
from echelon.plan.axes import words
from echelon.tools.memory_profile.training_job import TrainingJob


def how_in_words(job: TrainingJob, plan: Plan) -> str:
    return ", ".join((f"{things(job.samples, 'sample')}{_mesh(plan)}", *_options(plan)))


def _mesh(plan: Plan) -> str:
    if plan.ranks == 1:
        return ""
    if not plan.is_model_parallel:
        return f" on each of {plan.ranks} processes"
    one = words(plan.mesh.get("stage", 1), plan.mesh.get("split", 1))
    copies = plan.mesh["replicate"]
    whom = f"each of {copies} copies" if copies > 1 else "one copy"
    given = f" to each process, {whom}" if plan.batch_per_split_rank else f" to {whom}"
    return f"{given} ({one}), {plan.ranks} processes"


def _options(plan: Plan) -> Iterator[str]:
    if plan.pipeline is not None:
        schedule = f" ({plan.pipeline.schedule})" if plan.mesh.get("stage", 1) > 1 else ""
        yield f"{things(plan.pipeline.micro_batches, 'micro-batch')}{schedule}"
    if plan.recompute or plan.recompute_chains:
        yield "recompute"
    if plan.low_memory is not None:
        yield "low_memory"
    elif plan.amp is not None:
        yield f"amp {plan.amp.dtype}{' (by itself, on a GPU)' if plan.fast.bf16 else ''}"
    if plan.shard is not None:
        yield f"shard {plan.shard.level}"
    yield from (name for name in ("lars", "lamb", "dgc") if getattr(plan, name) is not None)
    if plan.local is not None:
        yield "localsgd"
    if plan.gradient_merge > 1:
        yield f"{plan.gradient_merge} batches an update"
