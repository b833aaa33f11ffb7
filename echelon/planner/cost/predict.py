"""Prediction of a Draft on a Cluster: the seconds of a step, by cause, and the memory of every rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.plan import Plan
from echelon.plan.prediction import PARTS, PredictedMemory, Prediction
from echelon.planner.cluster.cluster import Cluster, Device
from echelon.planner.cost.compute import UnitSeconds, stream_seconds
from echelon.planner.cost.draft_of_plan import draft_of, stepping_optimizer
from echelon.planner.cost.pipeline_timing import PipelineTiming, StageDurations, estimate_pipeline, simulate_pipeline
from echelon.planner.cost.placement import MeshPlacement, ReplicaPlacement, place
from echelon.planner.cost.replica_traffic import (
    ExposedTraffic,
    OverlapWindow,
    StageParameterCounts,
    find_exposed_traffic,
)
from echelon.planner.cost.stage_costs import Array, CostSetting, UnitCosts
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.model_costs import ProfileLike
from echelon.strategy.annotations.marks import ScheduleName

USUAL_SCHEDULE: ScheduleName = "1f1b"


def predict(
    profile: ProfileLike,
    cluster: Cluster,
    plan: Draft | Plan,
    *,
    system: System = ECHELON,
    optimizer: str = "adam",
    simulate: bool = True,
    events: bool = False,
) -> Prediction:
    """Predict the time and memory of one step.

    profile:   profile of the model
    cluster:   the machines
    plan:      a Draft, or the Plan of a run
    system:    figures of the framework that runs the plan; default: Echelon
    optimizer: name of the optimizer, one of ``system.state``; default "adam"
    simulate:  True to simulate the pipeline event by event, False to use closed forms; default True
    events:    True to include the pipeline's timeline; default False

    >>> cluster = echelon.planner.Cluster.parse("8xA100")
    >>> found = echelon.planner.predict(profile, cluster, echelon.planner.Draft(batch=64, replicate=8))
    """
    if isinstance(plan, Draft):
        return CostModel(profile, cluster, system, optimizer).predict(plan, simulate=simulate, events=events)
    costs, draft = CostModel(profile, cluster, system, stepping_optimizer(plan, optimizer)), draft_of(plan, profile)
    if plan.batch_per_split_rank:  # split ranks with batches of their own are timed as replicas
        draft = draft.replaced(replicate=plan.replicas, split=1, widths=())
    timed = draft.replaced(micro_batches=draft.micro_batches * plan.gradient_merge)
    found = costs.predict(timed, simulate=simulate, events=events, memory=False)
    merge, low_memory = plan.gradient_merge, plan.low_memory is not None
    return replace(found, memory=costs.memory(draft, costs.placement(draft), merge=merge, low_memory=low_memory))


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage of one replica, as arrays over stages.

    split_*: exposed collectives inside layers
    norm:    exchange of batch-norm statistics, forward and backward together
    *_host:  time of the host beyond that of the device
    """

    forward: Array
    backward: Array
    for_weights: Array
    replay: Array
    split_forward: Array
    split_backward: Array
    norm: Array
    forward_host: Array
    backward_host: Array

    def passes(self) -> tuple[Array, Array]:
        """Return the seconds of F and B."""
        norm = self.norm / 2
        return (
            self.forward + self.split_forward + norm + self.forward_host,
            self.backward + self.replay + self.split_backward + norm + self.backward_host,
        )


class CostModel:
    """Predictions for one model on one cluster. Costs of units and placements of meshes are cached between drafts."""

    def __init__(
        self, profile: ProfileLike, cluster: Cluster, system: System = ECHELON, optimizer: str = "adam"
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.system = system
        self.optimizer = optimizer
        self.units = UnitCosts(profile, system)
        self.update_bytes = {amp: system.update_bytes(optimizer, amp) for amp in (None, "bf16", "fp16")}
        self._placements: dict[Hashable, MeshPlacement] = {}

    def predict(self, draft: Draft, *, simulate: bool = True, events: bool = False, memory: bool = True) -> Prediction:
        """Predict one step of the draft; ``memory=False`` omits memory, for callers that need only time."""
        self._check(draft)
        placement = self.placement(draft)
        slowest: _Replica | None = None
        for kind in placement.replicas:
            replica = _Replica(self, draft, placement, kind, simulate, events)
            if slowest is None or replica.end > slowest.end:
                slowest = replica
        assert slowest is not None
        parts = slowest.parts()
        held = self.memory(draft, placement) if memory else ()
        return Prediction(sum(parts.values()), parts, held, slowest.timeline.events)

    def placement(self, draft: Draft) -> MeshPlacement:
        groups = draft.sharing if draft.shard else 0
        key = draft.replicate, draft.stage, draft.split, draft.shares, draft.widths, draft.order, groups
        if key not in self._placements:
            self._placements[key] = place(draft, self.cluster)
        return self._placements[key]

    def unit_seconds(
        self, samples: int, split: int, amp: str | None, device: Device, compiled: bool = False
    ) -> list[UnitSeconds]:
        """Return the seconds of every unit, for one micro-batch on one device of a split."""
        return [
            self.units.unit(unit, device, compiled) for unit in self.units.sheet(samples, split, amp, compiled).units
        ]

    def memory(
        self,
        draft: Draft,
        placement: MeshPlacement,
        ranks: Iterable[int] | None = None,
        *,
        merge: int = 1,
        low_memory: bool = False,
    ) -> tuple[PredictedMemory, ...]:
        """Return the peak memory of every rank along the stage axis, or of ``ranks`` only.

        merge, low_memory: options of a Plan that a draft does not have; see ``find_peak_moments``
        """
        found: tuple[PredictedMemory, ...] = ()
        for kind in self._distinct_memory(draft, placement):
            limits = [min(device.memory for device, _ in kind.workers[rank]) for rank in range(draft.stage)]
            own = self.replica_memory(_evenly(draft, kind.share), limits, ranks, merge=merge, low_memory=low_memory)
            found = tuple(map(_fuller, found, own)) if found else own
        return found

    def _distinct_memory(self, draft: Draft, placement: MeshPlacement) -> Iterable[ReplicaPlacement]:
        """Return the replicas to examine: of those with equal devices, the one with the largest share."""
        found: dict[Hashable, ReplicaPlacement] = {}
        for kind in placement.replicas:
            key = tuple(tuple(device.name for device, _ in workers) for workers in kind.workers)
            if key not in found or kind.share > found[key].share:
                found[key] = kind
        return found.values()

    def replica_memory(
        self,
        draft: Draft,
        limits: Sequence[float],
        ranks: Iterable[int] | None = None,
        *,
        merge: int = 1,
        low_memory: bool = False,
    ) -> tuple[PredictedMemory, ...]:
        """Return the peak memory of a replica of ``draft``; ``limits``: bytes of each rank along the stage axis."""
        from echelon.planner.cost.rank_memory import find_peak_moments

        on_cpu = all(device.name.startswith("CPU") for device in self.cluster.kinds)
        place: Literal["cpu", "cuda"] = "cpu" if on_cpu else "cuda"
        found = find_peak_moments(
            self.profile,
            draft,
            limits,
            system=self.system,
            optimizer=self.optimizer,
            place=place,
            ranks=ranks,
            merge=merge,
            low_memory=low_memory,
        )
        return tuple(one.memory for one in found)

    def _check(self, draft: Draft) -> None:
        units = len(self.profile.names)
        if any(not 0 < cut < units for cut in draft.cuts) or list(draft.cuts) != sorted(set(draft.cuts)):
            raise UsageError(
                f"cuts={draft.cuts} do not cut {units} units into {draft.stages} stages: "
                f"use ascending numbers from 1 to {units - 1}"
            )
        if draft.split > self.profile.splits:
            raise UsageError(
                f"split={draft.split}: {self.profile.name} can be split over {self.profile.splits} at most; use that "
                "or less"
            )


def _evenly(draft: Draft, share: float) -> Draft:
    """Return the draft in which every replica has ``share`` times an even share of the batch."""
    if not draft.shares:
        return draft
    each = max(1, round(draft.batch / draft.replicate * share))
    return draft.replaced(batch=each * draft.replicate, shares=())


def _fuller(one: PredictedMemory, other: PredictedMemory) -> PredictedMemory:
    """Return the memory that exceeds its limit more, or leaves less of it free."""
    return max(one, other, key=lambda memory: memory.total / (memory.limit or 1.0))


def _one_by_one(forward: Array, backward: Array, edges: list[float]) -> tuple[Array, Array, list[float]]:
    """Return F, B and edges for GPipe, whose stages send one micro-batch after another.

    A transfer that takes longer than its stage limits the rate, so F and B take at least as long as the transfer.
    """
    link = np.array(edges)
    there, back = np.maximum(forward, link), np.maximum(backward, np.roll(link, 1))
    left = np.minimum(link, np.maximum(forward, np.roll(backward, -1)))  # from the end of that F or B to the arrival
    return there, back, left.tolist()


class _Replica:
    """One replica's step: its pipeline, then communication with other replicas, then the update."""

    def __init__(
        self,
        costs: CostModel,
        draft: Draft,
        placement: MeshPlacement,
        kind: ReplicaPlacement,
        simulate: bool,
        events: bool,
    ) -> None:
        self.costs = costs
        self.draft = draft
        self.placement = placement
        self.kind = kind
        self.system = costs.system
        self.setting = CostSetting(draft.micro_batch * kind.share, draft.split, draft.amp, draft.compile)
        self.bounds = [0, *draft.cuts, len(costs.profile.names)]
        self.sizes = costs.units.sizes(self.setting).between(self.bounds)
        self.host = kind.workers[0][0][0].engine
        self.times = self._stage_times()
        self.passes = self.times.passes()
        self.on_rank = self._by_rank(self.sizes)
        self.exchanges = self._exchanges()
        self.timeline = self._timeline(simulate, events)
        waits = [end + found.gradients for end, found in zip(self.timeline.ends, self.exchanges, strict=True)]
        self.reduced = max(waits) + self._tied()
        self.update = max(self._update(rank) for rank in range(draft.stage))
        self.gathered = max(found.parameters for found in self.exchanges)
        self.step = self.host.get("step", self.system.step)
        self.end = self.reduced + self.update + self.gathered + self.step

    # ---- computing ----

    def _stage_times(self) -> StageTimes:
        """Return the times of every stage on the slowest of its devices."""
        units, draft = self.costs.units, self.draft
        split = units.messages(self.setting, self.placement.split).between(self.bounds)
        if self.draft.split > 1:
            split += self.host.get("split", 0.0) * units.message_counts(self.setting).between(self.bounds)
        norm = units.statistics(self.setting, self.placement.replicate).between(self.bounds).sum(axis=0)
        f, b, w, f_host, b_host, replay, replay_host = self._slowest_devices()
        if self._is_captured():
            f_host = b_host = replay_host = np.zeros_like(f_host)
        again = np.array(draft.recompute or (False,) * draft.stages, dtype=float)
        split_forward, split_backward = split[0], split[1] + again * split[2]
        apart = self._taken_apart(f_host + b_host)
        replay, b_host = again * replay, b_host + again * replay_host
        adding, adding_host = self._adding()
        b, w, b_host, each = b + adding, w + adding, b_host + adding_host, self._each_pass()
        sent = self._packing()
        return StageTimes(
            forward=f,
            backward=b,
            for_weights=w + apart / 4,
            replay=replay,
            split_forward=split_forward,
            split_backward=split_backward,
            norm=norm,
            forward_host=np.maximum(0.0, f_host - f - split_forward) + each + apart / 2 + sent,
            backward_host=np.maximum(0.0, b_host - b - replay - split_backward) + each + apart / 2 + np.roll(sent, 1),
        )

    def _is_captured(self) -> bool:
        """Return True if forward and backward become one CUDA graph where the host is slower than the device."""
        draft = self.draft
        return self.system.captures and draft.ranks == 1 and draft.micro_batches == 1

    def _taken_apart(self, host: Array) -> Array:
        """Return the seconds of the host to defer weight gradients; ``host``: seconds to launch all kernels."""
        launch = self.kind.workers[0][0][0].launch
        if self.draft.schedule != "zero-bubble" or not launch:
            return np.zeros_like(host)
        return host / launch * self.host.get("deferred", 0.0)

    def _each_pass(self) -> float:
        """Return the seconds of the host for one stage's forward or backward of one micro-batch."""
        micro = self.host.get("micro", self.system.micro) / 2 / self.draft.chunks
        return micro if self.draft.stage == 1 else self.host.get("action", micro)

    def _adding(self) -> Array:
        """Return the seconds of the device and of the host to accumulate gradients, per micro-batch.

        The gradients of the first micro-batch need no addition.
        """
        device, micros = self.kind.workers[0][0][0], self.draft.micro_batches
        adding = self.costs.units.adding(self.setting, device).between(self.bounds)
        return adding * (1 - 1 / micros)

    def _packing(self) -> Array:
        """Return the seconds of every stage to pack its output into a message; the gradient's message is as large."""
        sent = np.zeros(self.draft.stages)
        if self.system.packs and self.draft.stage > 1:
            device, received = self.kind.workers[0][0][0], self.costs.units.received(self.setting)
            sent[:-1] = [stream_seconds(3 * float(received[first]), device) for first in self.draft.cuts]
        return sent

    def _slowest_devices(self) -> Array:
        """Return the rows of ``UnitCosts.computing`` by stage, for the slowest device of each stage."""
        units = self.costs.units
        first = self.kind.workers[0]
        if len(first) == 1 and all(workers is first for workers in self.kind.workers):  # all stages have equal devices
            (device, width), *_ = first
            if width == 1.0:
                return units.computing(self.setting, device, self.placement.split).between(self.bounds)
        by_kind: dict[str, Array] = {}
        columns = []
        for stage in range(self.draft.stages):
            found = []
            for device, width in self.kind.workers[stage % self.draft.stage]:
                if device.name not in by_kind:
                    by_kind[device.name] = units.computing(self.setting, device, self.placement.split).between(
                        self.bounds
                    )
                column = by_kind[device.name][:, stage]
                found.append(column * ([width] * 3 + [1.0] * 2 + [width, 1.0]) if width != 1.0 else column)
            columns.append(max(found, key=lambda column: column[0] + column[1]))
        return np.array(columns).T

    def _timeline(self, simulate: bool, events: bool) -> PipelineTiming:
        draft = self.draft
        forward, backward = self._lengthened()
        if draft.stages == 1:
            makespan = draft.micro_batches * float(forward[0] + backward[0])
            return PipelineTiming(makespan, makespan, (makespan,))
        name, edges = draft.schedule or USUAL_SCHEDULE, self._edges()
        if name == "gpipe":
            forward, backward, edges = _one_by_one(forward, backward, edges)
        stages = StageDurations(forward.tolist(), backward.tolist(), self.times.for_weights.tolist(), edges)
        if simulate or events:
            return simulate_pipeline(name, stages, draft.stage, draft.micro_batches, events)
        return estimate_pipeline(name, stages, draft.stage, draft.micro_batches)

    def _lengthened(self) -> tuple[Array, Array]:
        """Return the seconds of F and B, including exposed communication of shards."""
        forward, backward = self.passes
        ranks = [stage % self.draft.stage for stage in range(self.draft.stages)]
        gathers = np.array([self.exchanges[rank].each_gather for rank in ranks]) / 2 / self.draft.chunks
        scatters = np.array([self.exchanges[rank].each_backward for rank in ranks]) / self.draft.chunks
        return forward + gathers, backward + gathers + scatters

    def _edges(self) -> list[float]:
        received = self.costs.units.received(self.setting)
        scattered, gathered = self.system.scatters_edges, not self.system.sequence_split
        firsts = self.draft.cuts
        return [
            *(
                self.placement.edge_seconds(stage % self.draft.stage, float(received[first]), scattered, gathered)
                for stage, first in enumerate(firsts)
            ),
            0.0,
        ]

    # ---- between replicas ----

    def _by_rank(self, each: Array) -> Array:
        """Return the sums over the stages of every rank; the last axis of ``each`` is that of stages."""
        found: Array = each.reshape(*each.shape[:-1], self.draft.chunks, self.draft.stage).sum(axis=-2)
        return found

    def _exchanges(self) -> list[ExposedTraffic]:
        """Return the communication of every rank, computed once for equal ranks, of which a long pipeline has many."""
        found: dict[Hashable, ExposedTraffic] = {}
        each = zip(*self.on_rank[[0, 1, 3]].tolist(), *self._by_rank(np.array(self.passes)).tolist(), strict=True)
        keys = [(*sums, workers[0][0].name) for sums, workers in zip(each, self.kind.workers, strict=True)]
        for key, workers in zip(keys, self.kind.workers, strict=True):
            if key not in found:
                trained, frozen, units, forward, backward, _ = key
                held, busy = StageParameterCounts(trained, frozen, units), OverlapWindow(forward, backward)
                group, across = self.placement.share, self.placement.across
                found[key] = find_exposed_traffic(self.draft, held, busy, group, workers[0][0], self.system, across)
        return [found[key] for key in keys]

    def _tied(self) -> float:
        """Return the seconds to reduce gradients of weights that several stages share."""
        total = 0.0
        for units, entries in zip(self.costs.profile.ties, self.costs.units.tied(self.setting), strict=True):
            stages = {sum(unit >= cut for cut in self.draft.cuts) % self.draft.stage for unit in units}
            if len(stages) > 1:
                width = self.system.reduced or self.system.gradient_bytes(self.draft.amp)
                total += 2 * max(self.placement.edges[rank].seconds(entries * width / 2) for rank in stages)
        return total

    def _update(self, rank: int) -> float:
        entries = float(self.on_rank[0, rank]) / self.draft.sharing
        moved, optimizer = entries * self.costs.update_bytes[self.draft.amp], self.costs.optimizer
        return max(
            moved / (device.bandwidth * device.updates.get(optimizer, device.update))
            for device, _ in self.kind.workers[rank]
        )

    # ---- by cause ----

    def parts(self) -> dict[str, float]:
        """Return the seconds of the busiest rank by cause; their sum is the step's time."""
        times, micros = self.times, self.draft.micro_batches
        forward, backward = self._lengthened()
        on_rank = self._by_rank(forward + backward).tolist()
        busiest = max(range(self.draft.stage), key=on_rank.__getitem__)

        def total(*arrays: Array) -> float:
            return micros * sum(float(array[busiest :: self.draft.stage].sum()) for array in arrays)

        each = self.exchanges[busiest]
        found = {
            "compute": total(times.forward, times.backward),
            "recompute": total(times.replay),
            "bubble": max(0.0, self.timeline.unlinked - micros * on_rank[busiest]),
            "split": total(times.split_forward, times.split_backward),
            "pipeline": self.timeline.makespan - self.timeline.unlinked,
            "gradients": self.reduced - self.timeline.makespan + micros * each.each_backward,
            "parameters": self.gathered + micros * each.each_gather,
            "batch norm": total(times.norm),
            "update": self.update,
            "host": total(times.forward_host, times.backward_host) + self.step,
        }
        return {part: found[part] for part in PARTS}
