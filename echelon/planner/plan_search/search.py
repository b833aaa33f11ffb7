"""Search for the fastest plans that fit: candidates are ranked by closed forms, the best of them by simulation.

Groups of plans (a mesh and a number of micro-batches) are visited in order of a lower bound on their time: all compute
distributed evenly, and a pipeline's unavoidable idle time. The search ends when the bound exceeds the times of plans
that were already found (branch and bound).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, with_memory_limit
from echelon.planner.cost.predict import CostModel
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.default_run import FP32_EAGER, DefaultRun
from echelon.planner.model_costs import ProfileLike
from echelon.planner.plan_search.draft_builder import DraftAttempt, DraftBuilder
from echelon.planner.plan_search.helpful_techniques import would_help
from echelon.planner.plan_search.meshes import CandidateMesh, MeshBounds, commonest, find_meshes, find_pools
from echelon.planner.plan_search.plan_shapes import (
    AllowedTechniques,
    PlanShape,
    amp_of,
    mechanisms,
)
from echelon.planner.plan_search.search_result import TIE, HelpfulTechnique, PlanChoice, RejectedPlan, SearchResult

__all__ = ["HelpfulTechnique", "PlanChoice", "RejectedPlan", "SearchResult", "search"]

FINALISTS = 12
LEAST_SHAPES = 12  # number of different shapes to find before a bound may end the search
EXHAUSTIVE = 4000  # up to this many shapes, all of them are tried
MOST_DRAFTS, MOST_CHECKS = 6000, 6000  # largest numbers of time predictions and of memory predictions in a search
CLOSE = 1.2  # times the faster amp setting: one that is slower than this on one device is slower in every plan
NEAR = 1.25  # times the fastest plan: the error of the closed forms
FEW_ACTIONS = 500  # largest number of actions of a schedule that is simulated repeatedly
MOST_ACTIONS = 250_000  # largest number of simulated actions in a search
NOTHING = 0.005  # fraction of a step's time: a smaller difference is ignored


def search(
    profile: ProfileLike,
    cluster: Cluster,
    *,
    batch: int,
    allow: Sequence[str] = (),
    memory: float | None = None,
    optimizer: str = "adam",
    system: System = ECHELON,
    keep: int = 10,
    fixed: Mapping[str, object] | None = None,
    devices: int | None = None,
    usual: DefaultRun = FP32_EAGER,
) -> SearchResult:
    """Search for the best plans for ``batch`` samples per step.

    profile:   profile of the model
    cluster:   the machines
    batch:     samples of the global batch
    allow:     allowed techniques that change numerical results: "amp", "fp16_allreduce", "dgc", "localsgd"
    memory:    bytes that training may use on each device; default: those of the cluster
    optimizer: name of the optimizer, one of ``system.state``; default "adam"
    system:    figures of the framework that runs the plan; default: Echelon
    keep:      largest number of plans in the result; default 10
    fixed:     fields of a Draft that every plan must have: ``{"split": 2}``
    devices:   exact number of devices of a plan, the first ones of the cluster; default: any, some may stay idle
    usual:     precision and compilation of a run without a strategy, which all plans have; default: fp32, not compiled

    >>> found = echelon.planner.search(profile, echelon.planner.Cluster.parse("8xA100"), batch=64)
    """
    begin = time.perf_counter()
    if batch < 1:
        raise UsageError(f"batch={batch}: a step takes 1 sample or more")
    plan_search = PlanSearch(
        profile, with_memory_limit(cluster, memory), batch, tuple(allow), optimizer, system, fixed or {}, devices, usual
    )
    answer = plan_search.answer(keep)
    return dataclasses.replace(answer, seconds=time.perf_counter() - begin)


@dataclass(frozen=True)
class PlanGroup:
    """The plans on one mesh with one number of micro-batches; ``bound``: lower bound on their time in seconds."""

    bound: float
    mesh: CandidateMesh
    micro_batches: int


@dataclass(eq=False)
class PlanSearch:
    """The state of one search."""

    profile: ProfileLike
    cluster: Cluster
    batch: int
    allow: tuple[str, ...]
    optimizer: str
    system: System
    fixed: Mapping[str, Any]
    devices: int | None = None
    usual: DefaultRun = FP32_EAGER

    def __post_init__(self) -> None:
        self.costs = CostModel(self.profile, self.cluster, self.system, self.optimizer)
        self.builder = DraftBuilder(self.costs, self.batch, self.fixed, self.usual)
        units = len(self.profile.names)
        self.techniques = AllowedTechniques(units, self.optimizer, (None,), frozenset(self.allow), self.fixed)
        self.techniques.check()
        self.techniques = dataclasses.replace(self.techniques, amps=self._amps())
        self.layers = commonest(self.costs.units.sheet(1, 1, None).units)
        self.found: list[PlanChoice] = []
        self._best: dict[object, float] = {}
        self._waiting: list[tuple[float, int, PlanGroup | DraftAttempt]] = []
        self._counter = itertools.count()
        self._frugal: dict[object, bool] = {}
        self._least_counts: dict[object, int] = {}
        self.in_host = max(pool.in_host for pool in find_pools(self.cluster, self.devices))

    def answer(self, keep: int) -> SearchResult:
        from echelon.planner.plan_search.infeasible import nearest_plan

        self.explore(beyond_host=False)
        if self.found:
            best, rejected = self.settled()
        # If a neighbor with a split over several hosts is the best plan, others of that kind may be faster still.
        if not self.found or best[0].draft.split > self.in_host:
            self.explore(beyond_host=True)
            if not self.found:
                return SearchResult((), (), self.builder.made, 0.0, nearest=nearest_plan(self))
            best, rejected = self.settled()
        helps = tuple(would_help(self, best[0]))
        behind = [choice for choice in best[1:] if choice.seconds >= best[0].seconds]
        as_quick = tuple(choice for choice in best[1:] if choice.seconds < best[0].seconds)
        return SearchResult(
            (best[0], *behind[: keep - 1]),
            rejected,
            self.builder.made,
            0.0,
            helps,
            notes=tuple(self.notes(best[0])),
            as_quick=as_quick,
        )

    def settled(self) -> tuple[list[PlanChoice], tuple[RejectedPlan, ...]]:
        """Return the best plans and the neighbors of the first one.

        If a neighbor is better, it becomes the best plan, and its own neighbors are examined.
        """
        from echelon.planner.plan_search.neighbours import neighbours

        best = self.ranked(self.finalists())
        rejected = tuple(neighbours(self, best[0]))
        while quicker := [each for each in rejected if _is_better(each, best[0])]:
            better = min(quicker, key=lambda each: each.against or 0.0)
            assert better.prediction is not None
            outline = _outline(better.draft)
            best = [
                PlanChoice(better.draft, better.prediction),
                *(one for one in best if _outline(one.draft) != outline),
            ]
            rejected = tuple(neighbours(self, best[0]))
        return best, rejected

    # ---- exploring ----

    def explore(self, beyond_host: bool) -> None:
        """Fill ``found`` with plans that fit, the fastest first according to closed forms.

        The heap is ordered by the least possible time. An attempt that does not fit is replaced by attempts that take
        longer, so the first plan that fits is the best, and memory is computed only for plans that are fast enough.

        beyond_host: True to include splits over several hosts
        """
        for group in self.groups(beyond_host):
            self._wait(group.bound, group)
        exhaustive = len(self._waiting) * 18 <= EXHAUSTIVE
        while self._waiting and self.builder.made < MOST_DRAFTS and self.builder.checks < MOST_CHECKS:
            bound, _, item = heapq.heappop(self._waiting)
            if bound > self._worth():
                break
            if isinstance(item, PlanGroup):
                self._open(item, exhaustive)
            else:
                self._try(item, exhaustive)
        self._waiting.clear()

    def _wait(self, seconds: float, item: PlanGroup | DraftAttempt) -> None:
        heapq.heappush(self._waiting, (seconds, next(self._counter), item))

    def _open(self, group: PlanGroup, exhaustive: bool) -> None:
        """Add the shapes of a group to the heap; if the search is not exhaustive, only the initial ones."""
        if not self.may_fit(group.mesh):
            return
        shapes = list(self.techniques.shapes(group.mesh, group.micro_batches))
        for shape in shapes if exhaustive else self._to_begin_with(shapes):
            attempt = self.builder.first(shape)
            self._wait(attempt.timed.seconds, attempt)

    def _to_begin_with(self, shapes: Sequence[PlanShape]) -> list[PlanShape]:
        """Return the shapes with the default schedule that may fit.

        In a pipeline, shard 3 gathers for every micro-batch, so it is used only if nothing else may fit.
        """
        usual = [shape for shape in shapes if (shape.schedule, shape.chunks) == (shapes[0].schedule, shapes[0].chunks)]
        last = [shape for shape in usual if shape.shard == 3 and shape.stages > 1]
        begin = [shape for shape in usual if shape not in last and self._is_small_enough(shape)]
        return begin or [shape for shape in last if self._is_small_enough(shape)]

    def _is_small_enough(self, shape: PlanShape) -> bool:
        """Return True if the shape's micro-batches are small enough that it may fit.

        The smallest sufficient number of micro-batches is found by bisection.
        """
        key = (shape.mesh.key, shape.shard, shape.comm_dtype, shape.approximate)
        if key not in self._least_counts:
            counts = self.techniques.micro_batches(shape.mesh, self.batch)
            at = bisect_left(counts, True, key=lambda count: self.builder.may_fit(shape.replaced(micro_batches=count)))
            self._least_counts[key] = counts[at] if at < len(counts) else self.batch + 1
        return shape.micro_batches >= self._least_counts[key]

    def _try(self, attempt: DraftAttempt, exhaustive: bool) -> None:
        choice = self.builder.checked(attempt)
        if choice is None:
            for other in self.builder.instead(attempt):
                self._wait(other.timed.seconds, other)
            return
        self._note(choice)
        schedules = self.techniques.schedules(attempt.shape.mesh)
        if exhaustive or (attempt.shape.schedule, attempt.shape.chunks) != schedules[0]:
            return
        for schedule, chunks in schedules[1:]:
            other = self.builder.first(attempt.shape.replaced(schedule=schedule, chunks=chunks))
            self._wait(other.timed.seconds, other)

    def _note(self, choice: PlanChoice) -> None:
        self.found.append(choice)
        outline = _outline(choice.draft)
        self._best[outline] = min(choice.seconds, self._best.get(outline, choice.seconds))

    def _worth(self) -> float:
        """Return the time above which plans are not worth trying, because LEAST_SHAPES shapes are already faster."""
        times = sorted(self._best.values())
        return times[LEAST_SHAPES - 1] if len(times) >= LEAST_SHAPES else float("inf")

    def groups(self, beyond_host: bool) -> Iterator[PlanGroup]:
        for mesh in self.meshes(beyond_host):
            for count in self.techniques.micro_batches(mesh, self.batch):
                yield PlanGroup(self._bound(mesh, count), mesh, count)

    def meshes(self, beyond_host: bool, fixed: Mapping[str, int] | None = None) -> Iterator[CandidateMesh]:
        axes = {axis: self.fixed[axis] for axis in ("replicate", "stage", "split") if axis in self.fixed}
        units, splits = len(self.profile.names), self.profile.splits
        bounds = MeshBounds(units, self.layers, splits, self.batch, beyond_host, axes | dict(fixed or {}), self.devices)
        return find_meshes(find_pools(self.cluster, self.devices), bounds)

    def _bound(self, mesh: CandidateMesh, micro_batches: int) -> float:
        """Return a lower bound on the seconds: evenly distributed compute, and the least idle time of a pipeline."""
        shape = PlanShape(mesh, micro_batches, amp=self.techniques.amps[0])
        replicas = sum(count / self.builder.least_seconds(shape, device) for count, device in mesh.replicas)
        rate = sum(count / self.builder.least_seconds(shape, device) for count, device in mesh.kinds)
        alone = self.builder.least_seconds(shape, mesh.replicas[0][1])
        working = self.batch / replicas / alone / rate
        return 0.9 * (working + (mesh.stage - 1) * self.builder.samples(shape) / rate / 4)

    def may_fit(self, mesh: CandidateMesh) -> bool:
        """Return True if the plan with the least memory on this mesh fits, by a quick check."""
        if mesh.key not in self._frugal:
            self._frugal[mesh.key] = any(map(self.builder.may_fit, self._frugal_shapes(mesh)))
        return self._frugal[mesh.key]

    def surely_fits(self, mesh: CandidateMesh) -> bool:
        shapes = self._frugal_shapes(mesh)
        return self.may_fit(mesh) and any(self.builder.fitting(shape) for shape in shapes)

    def _frugal_shapes(self, mesh: CandidateMesh) -> Iterator[PlanShape]:
        """Yield the shapes with the least memory: the smallest micro-batches, and the highest levels of sharding."""
        counts, schedules = self.techniques.micro_batches(mesh, self.batch), self.techniques.schedules(mesh)
        for schedule, chunks in schedules[:1]:
            plain = PlanShape(mesh, counts[-1], schedule, chunks, amp=self.techniques.amps[0])
            exchanges = sorted(self.techniques.exchanges(plain), key=lambda exchange: -exchange["shard"])
            for exchange in exchanges[:2]:
                yield plain.replaced(**exchange)

    # ---- choosing ----

    def finalists(self) -> list[PlanChoice]:
        """Return the best plan of each shape and all nearly as fast plans, with polished cuts.

        Each plan is also tried with the other amp settings, and with state that the replicas of a host share.
        """
        quickest = sorted(self.found, key=lambda choice: choice.seconds)
        best: dict[object, PlanChoice] = {}
        for choice in quickest:
            best.setdefault(_outline(choice.draft), choice)
        near = [choice for choice in quickest if choice.seconds <= NEAR * quickest[0].seconds]
        chosen = list({one.draft: one for one in [*list(best.values())[:FINALISTS], *near[:FINALISTS]]}.values())
        others = [
            self.builder.predicted(choice.draft.replaced(amp=amp))
            for choice in chosen
            for amp in self.techniques.amps[1:]
        ]
        others += [self.builder.predicted(draft) for choice in chosen for draft in self.in_groups(choice.draft)]
        chosen += [choice for choice in others if choice.prediction.fits]
        return sorted((self.polished(choice) for choice in chosen), key=lambda choice: choice.seconds)

    def in_groups(self, draft: Draft) -> Iterator[Draft]:
        """Yield the plan with training state shared by the replicas of one host (HSDP), if they are some of many."""
        sizes = {len(host.devices) for _, host in self.cluster.hosts}
        within = min(sizes) // (draft.stage * draft.split)
        if not draft.shard or draft.order or len(sizes) > 1 or not 1 < within < draft.replicate:
            return
        if draft.replicate % within == 0 and self.fixed.get("within", within) == within:
            yield draft.replaced(within=within)
            if any(draft.recompute) and "recompute" not in self.fixed:  # which hid gathers between hosts
                yield draft.replaced(within=within, recompute=())

    def polished(self, choice: PlanChoice) -> PlanChoice:
        """Move cuts by one unit if that helps, because the partition does not consider transfers between stages."""
        if "cuts" in self.fixed or not 1 < choice.draft.stages <= 16:
            return choice
        choice = self.timed(choice)
        for at, cut in enumerate(choice.draft.cuts):
            for moved in (cut - 1, cut + 1):
                cuts = (*choice.draft.cuts[:at], moved, *choice.draft.cuts[at + 1 :])
                if _ascending((0, *cuts, len(self.profile.names))):
                    other = self.timed(self.builder.predicted(choice.draft.replaced(cuts=cuts)))
                    if other.prediction.fits and other.seconds < choice.seconds * (1 - 1e-9):
                        choice = other
        return choice

    def timed(self, choice: PlanChoice) -> PlanChoice:
        """Return the choice with simulated time if its schedule is short, otherwise unchanged."""
        return self.exactly(choice) if _actions(choice.draft) <= FEW_ACTIONS else choice

    def ranked(self, choices: Sequence[PlanChoice]) -> list[PlanChoice]:
        """Simulate the choices and sort them by time; the first is the simplest of those that are equally fast."""
        simulated: list[PlanChoice] = []
        actions = 0
        for choice in choices:
            actions += _actions(choice.draft)
            if actions > MOST_ACTIONS and simulated:
                break
            simulated.append(self.exactly(choice))
        others = choices[len(simulated) :]  # too long to simulate, and slower by closed forms than those simulated
        simulated.sort(key=lambda choice: choice.seconds)
        as_quick = [choice for choice in simulated if choice.seconds <= simulated[0].seconds * (1 + TIE)]
        first = min(as_quick, key=lambda choice: (mechanisms(choice.draft), choice.draft.ranks, choice.seconds))
        rest = sorted((one for one in [*simulated, *others] if one is not first), key=lambda one: one.seconds)
        distinct: dict[object, PlanChoice] = {}
        for choice in [first, *rest]:
            distinct.setdefault(_outline(choice.draft), choice)
        return list(distinct.values())

    def exactly(self, choice: PlanChoice) -> PlanChoice:
        if choice.draft.stages == 1 or _actions(choice.draft) > MOST_ACTIONS:
            return choice
        return PlanChoice(choice.draft, self.costs.predict(choice.draft, simulate=True))

    def alike(self, best: PlanChoice, other: PlanChoice) -> tuple[PlanChoice, PlanChoice]:
        """Return both choices with comparable times: both simulated or, for long schedules, both by closed forms."""
        if max(_actions(best.draft), _actions(other.draft)) <= MOST_ACTIONS // 10:
            return best, self.exactly(other)
        return self.builder.predicted(best.draft), other

    def shape_of(self, draft: Draft) -> PlanShape:
        """Return the shape of a draft, with the mesh that the draft was made from."""
        sizes = {"replicate": draft.replicate, "stage": draft.stage, "split": draft.split}
        meshes = self.meshes(beyond_host=True, fixed=sizes)
        mesh = next(mesh for mesh in meshes if mesh.order == draft.order and bool(mesh.parts) == bool(draft.widths))
        same = ("micro_batches", "schedule", "chunks", "shard", "amp", "comm_dtype", "approximate")
        return PlanShape(mesh, **{name: getattr(draft, name) for name in same})

    # ---- if no plan fits ----

    def elsewhere(self, cluster: Cluster) -> PlanSearch:
        return dataclasses.replace(self, cluster=cluster, devices=None)

    def largest_meshes(self) -> Iterator[CandidateMesh]:
        """Yield, for each number of stages and size of the split, the mesh with the most replicas.

        With several kinds of hosts, all meshes are yielded.
        """
        seen: set[tuple[int, int]] = set()
        for mesh in self.meshes(beyond_host=True):
            if (mesh.stage, mesh.split) not in seen or len(self.cluster.hosts) > 1:
                seen.add((mesh.stage, mesh.split))
                yield mesh

    def notes(self, best: PlanChoice) -> Iterator[str]:
        there = min(self.cluster.size, self.devices or self.cluster.size)
        idle = there - best.draft.ranks
        if idle and best.draft.replicate >= self.batch:
            yield f"{idle} of {there} devices stay idle: there is no more than a sample for each of the replicas"
        elif idle:
            yield f"{idle} of {there} devices stay idle: with them a step would take longer or as long"

    def _amps(self) -> tuple[Any, ...]:
        """Return the amp settings that plans may use, the fastest first."""
        if "amp" in self.fixed:
            return (self.fixed["amp"],)
        if self.usual.amp:
            return (self.usual.amp,)
        if "amp" not in self.allow:
            return (None,)
        device = self.cluster.kinds[0]
        mesh = CandidateMesh(1, 1, 1, (device,), ((1, device),))
        times = {
            amp: self.builder.micro_batch_seconds(PlanShape(mesh, amp=amp), device)[-1]
            for amp in (None, amp_of(self.cluster))
        }
        first, second = sorted(times, key=lambda amp: times[amp])
        return (first, second) if times[second] < CLOSE * times[first] else (first,)


def _is_better(neighbour: RejectedPlan, best: PlanChoice) -> bool:
    """Return True if the neighbor is faster; a more complex one must be faster by more than the prediction error."""
    more = mechanisms(neighbour.draft) > mechanisms(best.draft)
    return neighbour.against is not None and neighbour.against < -(TIE if more else NOTHING)


def _outline(draft: Draft) -> tuple[object, ...]:
    """Return a key that differs for plans that are different enough to be listed separately."""
    fields = ("replicate", "stage", "split", "schedule", "chunks", "comm_dtype", "approximate", "order")
    return (*(getattr(draft, name) for name in fields), bool(draft.shares), bool(draft.widths))


def _actions(draft: Draft) -> int:
    """Estimate the number of actions to simulate: some rounds of the schedule, twice, for replicas of each size.

    A long schedule is periodic, so only some of its rounds are simulated.
    """
    if draft.stages == 1:
        return 0
    short = min(draft.micro_batches, 8 * draft.stage)
    sizes = len(set(draft.shares)) or 1
    return 2 * short * draft.stages * (3 if draft.schedule == "zero-bubble" else 2) * sizes


def _ascending(bounds: Sequence[int]) -> bool:
    return all(first < second for first, second in itertools.pairwise(bounds))
