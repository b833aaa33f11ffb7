"""The fullest moment of each rank: what a plan holds always, exactly, and on top what the planner's memory model says
that computing needs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

from echelon.distributed.mesh_groups import MeshGroups
from echelon.parallel.low_memory.backward_updates import UNDER_WAY
from echelon.parallel.low_memory.formats import AT_ONCE
from echelon.plan import Plan
from echelon.plan.draft import Draft
from echelon.planner.cost.rank_memory import PeakMoment, find_peak_moments
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.profiling.optimizer_state import optimizer_name
from echelon.planner.profiling.profile import Profile
from echelon.strategy.annotations.marks import within
from echelon.tools.memory_profile.resident import ResidentEstimator, ResidentMemory
from echelon.tools.memory_profile.saved_activations import kept_by_stage, segments_of
from echelon.tools.memory_profile.training_job import JobPlanner, Optimizers, TrainingJob

#: What the peak is made of, as the planner's Memory names it.
KINDS = ("parameters", "gradients", "optimizer", "activations", "transient", "exchange", "buffers")
#: Bytes for each entry that a lean update goes over at a time on a CPU, measured on weights of 2^20 entries; a GPU has
#: one kernel for it.
LEAN_ON_CPU = 68


@dataclasses.dataclass(frozen=True)
class RankGroupPeak:
    """Ranks that hold the same: what that is, and of what their fullest moment is made."""

    grids: list[MeshGroups]
    holding: ResidentMemory
    kinds: dict[str, int]
    moment: str

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for grid in self.grids for rank in grid.ranks()))


@dataclasses.dataclass(frozen=True)
class JobMemory:
    """A job as it would run. ``draft`` is in the units of ``profile``; samples: of the batch that a replica is given"""

    samples: int
    plan: Plan
    profile: Profile
    draft: Draft
    places: list[RankGroupPeak]

    @property
    def peak(self) -> int:
        return max(place.peak for place in self.places)

    @property
    def rough(self) -> bool:
        return _is_long(self.plan)


class PeakEstimator:
    """Of jobs of one model."""

    def __init__(self, profile: Profile, optimizers: Optimizers) -> None:
        self._planner, self._holdings = JobPlanner(profile, optimizers), ResidentEstimator(profile.model, optimizers)
        self._name = optimizer_name(optimizers)

    def spread(self, job: TrainingJob) -> JobMemory:
        plan = self._planner.plan(job)
        profile, draft = self._planner.draft_for_plan(plan, job.samples)
        draft = draft.replaced(recompute=()) if _is_long(plan) else draft
        optimizer = "lamb" if plan.lamb else "lars" if plan.lars else self._name
        found = find_peak_moments(
            profile, draft, system=_system(plan, optimizer), optimizer=optimizer, place=profile.device
        )
        found = tuple(_in_long_segments(plan, profile, draft, peak) for peak in found)
        places = [
            RankGroupPeak(grids, holding, _kinds(plan, holding, peak, profile.device), _in_words(profile, peak))
            for grids, holding in self._holdings.of(plan)
            for peak in [found[grids[0].at["stage"]]]
        ]
        return JobMemory(job.samples, plan, profile, draft, places)


def _system(plan: Plan, optimizer: str) -> System:
    """As Echelon trains. State is the same at every moment, and is put in exactly afterwards."""
    known = replace(ECHELON, state={optimizer: 0.0})
    if plan.lean is None:
        return known
    # gradients are let go at once, and weights are there in 16 bits: none are cast
    return replace(known, amp_weights=2.0, amp_gradients=0.0)


def _is_long(plan: Plan) -> bool:
    several = bool(plan.chains) or any(len(names) > 1 for names in plan.recompute)
    return several and plan.mesh.get("stage", 1) == 1


def _in_long_segments(plan: Plan, profile: Profile, draft: Draft, peak: PeakMoment) -> PeakMoment:
    """Where several modules are recomputed together, which no draft can say: what is kept is known, and on top comes
    all that the largest segment makes while it is run again."""
    if not _is_long(plan):
        return peak
    samples = samples_of(draft)
    kept, plain = (kept_by_stage(profile, each, samples)[0] for each in (plan, replace(plan, recompute=(), chains=())))
    again = [
        sum(size for name, size in plain.made.items() if any(within(name, each) for each in names))
        for names in segments_of(profile, plan, samples)
    ]
    held = float(kept.made.total() + kept.given.total())
    memory = replace(peak.memory, activations=held, transient=peak.memory.transient + max(again, default=0))
    return replace(peak, memory=memory)


def _kinds(plan: Plan, holding: ResidentMemory, peak: PeakMoment, place: str) -> dict[str, int]:
    kinds = {kind: round(getattr(peak.memory, kind)) for kind in KINDS}
    kinds |= {kind: holding.total(kind) for kind in ("parameters", "optimizer")}
    if plan.lean is not None:
        kinds["gradients"] = holding.largest
        kinds["transient"] += LEAN_ON_CPU * min(holding.largest // 2, AT_ONCE) if place == "cpu" else 0
        kinds["exchange"] += (UNDER_WAY + 1) * 2 * holding.largest if plan.ranks > 1 else 0  # sums are in fp32
    elif plan.gradient_merge > 1 and plan.pipeline is not None:
        kinds["gradients"] = max(kinds["gradients"], holding.total("whole"))  # those of the batch before
    elif plan.gradient_merge > 1 and plan.shard is not None and plan.shard.level > 1:
        kinds["gradients"] += holding.total("gradients")
    return kinds


def _in_words(profile: Profile, peak: PeakMoment) -> str:
    """``backward of layers.3``"""
    if peak.moment == "exchange":
        return "end of backward, when the last gradients leave"
    if peak.moment == "update" or peak.unit is None:
        return peak.moment
    name = profile.members[peak.unit][0]
    if not name:
        return f"{peak.moment} of the model"
    beyond = " and what follows it" if peak.unit == len(profile.members) - 1 else ""
    return f"{peak.moment} of {name}{beyond}"


def in_flight(draft: Draft, stage: int, kept: dict[int, int]) -> dict[int, int]:
    """By the stages of a rank along the stage axis, micro-batches whose activations it has when it has most of them."""
    from echelon.planner.cost.in_flight import moments_of_rank

    own = list(range(stage, draft.stages, draft.stage))
    if draft.stage == 1:
        return dict.fromkeys(own, 1)
    found = moments_of_rank(draft.schedule or "1f1b", draft.stages, draft.stage, draft.micro_batches, stage)
    counts = [[n + (at == one.chunk) for at, n in enumerate(one.open)] for one in found if one.kind in "FB"]
    most = max(counts, key=lambda each: sum(n * kept.get(at, 0) for n, at in zip(each, own, strict=True)))
    return dict(zip(own, most, strict=True))


def samples_of(draft: Draft) -> int:
    """Of a micro-batch."""
    return max(1, math.ceil(draft.micro_batch - 1e-9))
