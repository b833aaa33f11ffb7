"""Compute the memory footprint of a job: peak of each rank, its moment, bytes of each module, and possible savings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim import Adam, AdamW

from echelon.base.errors import UsageError
from echelon.base.formatting import things
from echelon.observability.runlog.rank_names import place_in_words
from echelon.observability.runlog.run_metadata import Footprint, MemorySaving, ModuleBytes
from echelon.plan import Plan
from echelon.plan.axes import words
from echelon.planner.cost.in_flight import micro_batches_in_flight
from echelon.planner.cost.rank_memory import samples_of
from echelon.planner.profiling.named_optimizers import named_optimizer
from echelon.planner.profiling.optimizer_state import Given
from echelon.planner.profiling.profile import Profile
from echelon.strategy import LowMemory, Shard
from echelon.strategy.combine import refuse_conflicts
from echelon.tools.memory_profile.peak import JobMemory, PeakEstimator, RankGroupPeak
from echelon.tools.memory_profile.saved_activations import LOSS, SavedActivations, kept_by_stage
from echelon.tools.memory_profile.training_job import Optimizers, TrainingJob

#: Row for bytes that belong to the model itself and to none of its submodules.
REST = "(model)"


def find_footprint(profile: Profile, job: TrainingJob, optimizer: Given | str) -> Footprint:
    """Return the footprint of the fullest rank of a job; if ranks differ, its ``each`` has those of all ranks.

    optimizer:  optimizers of the model, or the name of one (see ``named_optimizers.NAMED``)
    """
    optimizers = _named(optimizer, profile.model)
    peaks = PeakEstimator(profile, optimizers)
    spread = peaks.spread(job)
    kept = kept_by_stage(spread.profile, spread.plan, samples_of(spread.draft))
    result = [_of_place(spread, place, kept) for place in spread.places]
    result.sort(key=lambda one: one.ranks)
    savings, refused = _savings(peaks, job, spread, optimizers)
    most = max(result, key=lambda one: one.peak)
    return dataclasses.replace(
        most,
        how=how_in_words(job, spread.plan),
        savings=savings,
        notes=(*_notes(spread), *refused),
        each=tuple(result) if len(result) > 1 else (),
    )


def _named(given: Given | str, model: nn.Module) -> Optimizers:
    if isinstance(given, str):
        return {"main": named_optimizer(given, model.parameters())}
    if isinstance(given, torch.optim.Optimizer):
        return {"main": given}
    return dict(given) if isinstance(given, Mapping) else {str(at): each for at, each in enumerate(given)}


def _of_place(spread: JobMemory, place: RankGroupPeak, kept: Mapping[int, SavedActivations]) -> Footprint:
    return Footprint(
        peak=place.peak,
        moment=place.moment,
        kinds=place.kinds,
        modules=tuple(_rows(spread, place, kept)),
        savings=(),
        measured=False,
        ranks=place.ranks,
        place=place_in_words(place.grids[0].coords, spread.plan.mesh, spread.draft.stages),
    )


def _rows(spread: JobMemory, place: RankGroupPeak, kept: Mapping[int, SavedActivations]) -> Iterator[ModuleBytes]:
    """Return one row per unit, and per module outside of units that holds memory, in the model's order."""
    units = [name for members in spread.profile.members for name in members if name]
    result: dict[str, ModuleBytes] = {}

    def add(name: str, **sizes: int) -> None:
        row = name if name == LOSS else next((unit for unit in units if _inside(name, unit)), name) or REST
        before = result.get(row) or ModuleBytes(row, 0, 0, 0, 0, 0)
        result[row] = dataclasses.replace(before, **{kind: getattr(before, kind) + of for kind, of in sizes.items()})

    for name, held in place.resident.parameters.items():
        owner = name.rpartition(".")[0]
        add(owner, parameters=held.parameters, gradients=held.gradients, optimizer=held.optimizer)
    for name, size in place.resident.buffers.items():
        add(name.rpartition(".")[0], buffers=size)
    parts = spread.samples / samples_of(spread.draft)
    for stage, count in _counts(spread, place, kept).items():
        for name, size in kept[stage].made.items():
            add(name, activations=count * size)
        for name, size in kept[stage].given.items():
            add(name, activations=round(parts * size))
    order = [*dict.fromkeys(next((u for u in units if _inside(n, u)), n) or REST for n in _modules(spread)), LOSS]
    return (result[name] for name in order if name in result and any(dataclasses.astuple(result[name])[1:]))


def _counts(spread: JobMemory, place: RankGroupPeak, kept: Mapping[int, SavedActivations]) -> dict[int, int]:
    sizes = {stage: one.made.total() for stage, one in kept.items()}
    return micro_batches_in_flight(spread.draft, place.grids[0].coords["stage"], sizes)


def _inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")


def _modules(spread: JobMemory) -> Iterator[str]:
    return (name for name, _ in spread.profile.model.named_modules())


def _savings(
    peaks: PeakEstimator, job: TrainingJob, spread: JobMemory, optimizers: Optimizers
) -> tuple[tuple[MemorySaving, ...], list[str]]:
    """Return the changes that lower the peak of the fullest rank, and notes on changes that are not possible."""
    result, refused = [], []
    for what, other in alternatives(job, spread.plan, optimizers):
        if isinstance(other, str):
            refused.append(f"{what} is left out: {other}")
            continue
        try:
            lower = spread.peak - peaks.spread(other).peak
        except UsageError as error:  # no such plan can be made for this model
            refused.append(f"{what} is left out: {str(error).partition('; ')[0]}")
            continue
        if lower > 0:
            result.append(MemorySaving(what, lower))
    return tuple(sorted(result, key=lambda saving: -saving.bytes)), refused


def _notes(spread: JobMemory) -> Iterator[str]:
    """Yield notes on what the footprint does not cover, or covers only roughly."""
    plan, draft = spread.plan, spread.draft
    if plan.offload or (plan.shard is not None and plan.shard.offload):
        yield "offloaded tensors are counted here as if they stayed on the device"
    if plan.low_memory is not None and plan.low_memory.state != "device" and spread.profile.device == "cuda":
        yield "low_memory moves remainders and moments to host memory where the device has no room; here all are on it"
    if len({place.resident.total("parameters") for place in spread.places}) > draft.stage and draft.split > 1:
        yield "the parts of a split differ: activations and the peak are computed for the first rank's"
    if spread.rough:
        yield "several modules are recomputed together: the peak is rough, within some 20 %"
    if any(isinstance(module, nn.LSTM) for module in spread.profile.model.modules()):
        yield (
            "LSTM layers hold more than is counted: the library's kernels keep several times the layer's output for "
            "backward, which cannot be seen here"
        )
    if plan.local is not None or plan.dgc is not None:
        yield "the state of LocalSGD and DGC is counted under 'exchange', as in plans"


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
        yield f"shard {plan.shard.level}{f' in groups of {plan.sharing}' if plan.shard.within else ''}"
    yield from (name for name in ("lars", "lamb", "dgc") if getattr(plan, name) is not None)
    if plan.local is not None:
        yield "localsgd"
    if plan.gradient_merge > 1:
        yield f"{plan.gradient_merge} batches an update"


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
    result: dict[str, dict[str, object]] = {}
    if not plan.recompute and not plan.recompute_chains:
        result["recompute"] = {"recompute": True}
    if plan.amp is None:
        result["amp bf16"] = {"amp": "bf16"}
    level = plan.shard.level if plan.shard else 0
    for higher in range(level + 1, 4) if plan.mesh["replicate"] > 1 else ():
        result[f"shard {higher}"] = {"shard": Shard(level=higher)}  # type: ignore[arg-type]
    if plan.low_memory is None and all(type(each) in (Adam, AdamW) for each in optimizers.values()):
        result["low_memory"] = {
            "low_memory": LowMemory(),
            "amp": None if plan.amp is None or plan.amp.dtype == "bf16" else plan.amp,
        }
    return result


def _marked(plan: Plan) -> list[str]:
    return [name for name, there in (("split", plan.splits), ("pipeline", plan.pipeline)) if there]
