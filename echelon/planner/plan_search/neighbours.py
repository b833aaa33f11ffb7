"""Neighbors of a plan: plans that differ in one decision, each with the reason why it is worse."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory, Prediction
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.plan_search.draft_builder import lack
from echelon.planner.plan_search.meshes import CandidateMesh
from echelon.planner.plan_search.plan_shapes import PlanShape
from echelon.planner.plan_search.search_result import PlanChoice, RejectedPlan
from echelon.strategy.annotations.marks import ScheduleName

if TYPE_CHECKING:
    from echelon.planner.plan_search.search import PlanSearch

AS_QUICK = 0.005  # fraction of a step's time: a smaller difference counts as none


@dataclass(frozen=True)
class Neighbour:
    """A different decision. ``what``: its name; ``tried``: plans with that decision, of which the fastest counts."""

    what: str
    tried: Callable[[], Iterable[PlanChoice]]


def neighbours(search: PlanSearch, best: PlanChoice) -> Iterator[RejectedPlan]:
    """Yield the neighbors of the best plan, each once."""
    shape = search.shape_of(best.draft)
    seen = {best.draft}
    for neighbour in _around(search, best, shape):
        chosen = _quickest(neighbour.tried())
        if chosen is not None and chosen.draft not in seen:
            seen.add(chosen.draft)
            yield rejected(search, best, chosen, neighbour.what)


def rejected(search: PlanSearch, best: PlanChoice, other: PlanChoice, what: str) -> RejectedPlan:
    if not other.prediction.fits:
        return RejectedPlan(other.draft, other.prediction, describe_overflow(other.prediction), what)
    base, compared = search.alike(best, other)
    against = compared.seconds / base.seconds - 1
    return RejectedPlan(compared.draft, compared.prediction, why(base, compared, search.cluster), what, against)


def _quickest(choices: Iterable[PlanChoice]) -> PlanChoice | None:
    """Return the fastest plan that fits; if none fits, the one that exceeds its memory least."""
    ways = list(choices)
    fitting = [choice for choice in ways if choice.prediction.fits]
    return min(fitting, key=lambda choice: choice.seconds) if fitting else min(ways, key=lack, default=None)


# ---- along each axis ----


def _around(search: PlanSearch, best: PlanChoice, shape: PlanShape) -> Iterator[Neighbour]:
    mesh = shape.mesh
    for axis, size in (("split", mesh.split), ("stage", mesh.stage)):
        for other in (size * 2, size // 2):
            if other and axis not in search.fixed and "cuts" not in search.fixed:
                yield Neighbour(_axis_words(axis, other), partial(_on_axis, search, shape, axis, other))
    if "micro_batches" not in search.fixed:
        for count in _beside(search.techniques.micro_batches(mesh, search.batch), shape.micro_batches):
            words = f"{count} micro-batches" if count > 1 else "1 micro-batch"
            yield Neighbour(words, partial(_made, search, shape.replaced(micro_batches=count)))
    for name, chunks in _other_schedules(search, shape):
        changed = shape.replaced(schedule=name, chunks=chunks)
        words = f"interleaved, {chunks} stages a rank" if chunks > 1 else str(name)
        yield Neighbour(words, partial(_made, search, changed))
    yield from _recomputing(search, best, shape)
    yield from _sharding(search, shape)
    yield from _groups(search, best)
    if mesh.replicate > 1 and len(mesh.replicas) == 1 and "replicate" not in search.fixed and not search.devices:
        half = mesh.replicate // 2
        yield Neighbour(f"{half * mesh.stage * mesh.split} devices", partial(_replicas, search, shape, half))


def _axis_words(axis: str, size: int) -> str:
    return f"{axis} {size}" if size > 1 else "no split" if axis == "split" else "no pipeline"


def _on_axis(search: PlanSearch, shape: PlanShape, axis: str, size: int) -> Iterator[PlanChoice]:
    """Yield plans with another size of one axis.

    These are the plans that the search found, and similar plans on meshes that share another axis with the plan's mesh.
    """
    old = shape.mesh
    yield from (choice for choice in search.found if getattr(choice.draft, axis) == size)
    for mesh in _meshes(search, axis, size):
        kept = [name for name in ("replicate", "stage", "split") if getattr(mesh, name) == getattr(old, name)]
        if not kept or mesh.size < 0.9 * old.size:
            continue
        schedules = search.techniques.schedules(mesh)
        schedule = (shape.schedule, shape.chunks)
        name, chunks = schedule if schedule in schedules else schedules[0] if schedules else (None, 1)
        shard = shape.shard if mesh.replicate > 1 else 0
        plain = shape.replaced(mesh=mesh, schedule=name, chunks=chunks, shard=shard)
        for count in _near(search.techniques.micro_batches(mesh, search.batch), search.batch, mesh, shape):
            yield from _made(search, plain.replaced(micro_batches=count))


def _replicas(search: PlanSearch, shape: PlanShape, replicate: int) -> Iterator[PlanChoice]:
    """Yield plans with another number of replicas, on otherwise equal meshes."""
    sizes = {"replicate": replicate, "stage": shape.mesh.stage, "split": shape.mesh.split}
    for mesh in search.meshes(beyond_host=True, fixed=sizes):
        shard = shape.shard if replicate > 1 else 0
        for count in _near(search.techniques.micro_batches(mesh, search.batch), search.batch, mesh, shape):
            yield from _made(search, shape.replaced(mesh=mesh, shard=shard, micro_batches=count))


def _meshes(search: PlanSearch, axis: str, size: int) -> Iterator[CandidateMesh]:
    return search.meshes(beyond_host=True, fixed={axis: size})


def _near(counts: list[int], batch: int, mesh: CandidateMesh, shape: PlanShape) -> list[int]:
    """Return numbers of micro-batches near the plan's number, and near the one that keeps their size."""
    wanted = shape.micro_batches * shape.mesh.replicate / mesh.replicate
    by_size = sorted(counts, key=lambda count: abs(count - wanted))[:2]
    by_count = sorted(counts, key=lambda count: abs(count - shape.micro_batches))[:1]
    return list(dict.fromkeys(by_size + by_count))


def _beside(counts: list[int], count: int) -> list[int]:
    below = [other for other in counts if other < count]
    above = [other for other in counts if other > count]
    return below[-1:] + above[:1]


def _other_schedules(search: PlanSearch, shape: PlanShape) -> list[tuple[ScheduleName | None, int]]:
    """Return the other schedules; of those with several stages per rank, only the nearest."""
    found = [pair for pair in search.techniques.schedules(shape.mesh) if pair != (shape.schedule, shape.chunks)]
    several = sorted((pair for pair in found if pair[1] > 1), key=lambda pair: abs(pair[1] - shape.chunks))[:1]
    return [pair for pair in found if pair[1] == 1] + list(several)


def _recomputing(search: PlanSearch, best: PlanChoice, shape: PlanShape) -> Iterator[Neighbour]:
    if "recompute" in search.fixed:
        return
    if any(best.draft.recompute):
        yield Neighbour("no recompute", lambda: [search.builder.draft(shape, ())])
    if not best.draft.recompute or not all(best.draft.recompute):
        yield Neighbour("recompute everywhere", lambda: [search.builder.draft(shape, (True,) * shape.stages)])


def _sharding(search: PlanSearch, shape: PlanShape) -> Iterator[Neighbour]:
    levels = [exchange["shard"] for exchange in search.techniques.exchanges(shape) if not exchange["comm_dtype"]]
    for level in _beside(sorted(set(levels)), shape.shard):
        words = f"shard {level}" if level else "no shard"
        changed = shape.replaced(shard=level, comm_dtype=None, approximate=None)
        yield Neighbour(words, partial(_made, search, changed))


def _groups(search: PlanSearch, best: PlanChoice) -> Iterator[Neighbour]:
    if best.draft.within and "within" not in search.fixed:
        words = f"shard {best.draft.shard} over all replicas"
        yield Neighbour(words, partial(_predicted, search, best.draft.replaced(within=0)))
    others = () if best.draft.within else search.in_groups(best.draft)
    for draft in itertools.islice(others, 1):
        words = f"shard {draft.shard} in groups of {draft.within}"
        yield Neighbour(words, partial(_predicted, search, draft))


def _predicted(search: PlanSearch, draft: Draft) -> list[PlanChoice]:
    return [search.builder.predicted(draft)]


def _made(search: PlanSearch, shape: PlanShape) -> list[PlanChoice]:
    """Return the plans of this shape that fit, or the one with recompute everywhere if none fits."""
    return search.builder.fitting(shape) or [
        search.builder.draft(shape, search.fixed.get("recompute", (True,) * shape.stages))
    ]


# ---- reasons as text ----


def describe_overflow(prediction: Prediction) -> str:
    """Return a line such as ``stage 0 needs 93 of 80 GB``."""
    rank = max(range(len(prediction.memory)), key=lambda at: _part(prediction.memory[at]))
    memory = prediction.memory[rank]
    who = f"stage {rank}" if len(prediction.memory) > 1 else "a device"
    return f"{who} needs {of_limit(memory)}"


def _part(memory: PredictedMemory) -> float:
    return memory.total / (memory.limit or 1.0)


def of_limit(memory: PredictedMemory) -> str:
    """Return text such as ``93 of 80 GB``, with enough digits to show the difference."""
    unit, scale = next((unit, scale) for unit, scale in _UNITS if memory.limit >= scale or scale == 1)
    digits = 0 if abs(memory.total - memory.limit) >= scale and memory.limit >= 10 * scale else 2
    return f"{memory.total / scale:.{digits}f} of {memory.limit / scale:.{digits}f} {unit}"


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))


def why(best: PlanChoice, other: PlanChoice, cluster: Cluster) -> str:
    """Return the reason why the other plan is worse: the part of the step that grew most, or memory or complexity."""
    if other.seconds <= best.seconds * (1 + AS_QUICK):
        return _as_quick(best, other)
    grown = {part: seconds - best.prediction.parts[part] for part, seconds in other.prediction.parts.items()}
    part = max(grown, key=grown.__getitem__)
    return _REASONS[part](best.draft, other.draft, cluster)


def _as_quick(best: PlanChoice, other: PlanChoice) -> str:
    before, after = best.prediction.fullest, other.prediction.fullest
    if other.draft.ranks > best.draft.ranks:
        return "as quick, on more devices"
    if after.activations > before.activations * 1.05 and after.total > before.total:
        return "as quick, more activations"
    if after.total > before.total * 1.01:
        return "as quick, more memory"
    return "as quick, but less simple"


def _computing(best: Draft, other: Draft, cluster: Cluster) -> str:
    if other.ranks < best.ranks:
        return "fewer devices compute"
    if other.micro_batch < best.micro_batch:
        return "smaller micro-batches compute slower"
    if other.split > best.split:
        return "smaller products compute slower"
    return "stages are less even" if other.stages > 1 else "more is computed on each device"


def _splitting(best: Draft, other: Draft, cluster: Cluster) -> str:
    in_host = min(len(host.devices) for _, host in cluster.hosts)
    return "all-reduce crosses hosts" if other.split > in_host else "more messages inside layers"


def _bubble(best: Draft, other: Draft, cluster: Cluster) -> str:
    if other.micro_batches < best.micro_batches:
        return "fewer micro-batches leave devices idle longer"
    return "the pipeline is idle longer"


def _gradients(best: Draft, other: Draft, cluster: Cluster) -> str:
    if other.shard > 1 and other.shard > best.shard:
        return "gradients are scattered for every micro-batch"
    return "sums of gradients take longer than backward hides"


_REASONS: dict[str, Callable[[Draft, Draft, Cluster], str]] = {
    "compute": _computing,
    "recompute": lambda best, other, cluster: "forward passes are repeated",
    "bubble": _bubble,
    "split": _splitting,
    "pipeline": lambda best, other, cluster: "stages wait for what others send",
    "gradients": _gradients,
    "parameters": lambda best, other, cluster: "gathering parameters is not hidden",
    "batch norm": lambda best, other, cluster: "statistics of batch norm wait for more replicas",
    "update": lambda best, other, cluster: "each device updates more weights",
    "host": lambda best, other, cluster: "the host starts more kernels",
}
