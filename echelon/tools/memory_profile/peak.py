"""Estimate the peak memory of each rank: exact resident bytes, plus the planner's estimate for computation."""

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

#: The parts of the peak, with the field names of PredictedMemory.
KINDS = ("parameters", "gradients", "optimizer", "activations", "transient", "exchange", "buffers")
#: Temporary bytes per element of a low_memory update on a CPU, measured on weights of 2^20 elements. A GPU needs none,
#: because it has one kernel for the update.
LOW_MEMORY_ON_CPU = 68


@dataclasses.dataclass(frozen=True)
class RankGroupPeak:
    """A group of ranks with equal memory.

    grids:    the ranks' views of the mesh
    holding:  resident memory of each of these ranks
    kinds:    bytes at the peak by kind (see KINDS)
    moment:   the moment of the peak as text
    """

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
    """The memory of all ranks of a job.

    samples:  samples of the batch of each replica
    plan:     the plan that the job would run
    profile:  profile of the model, with the units that ``draft`` uses
    draft:    the plan as a draft
    places:   peak memory of each group of equal ranks
    """

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
    """Estimates the peak memory of jobs of one model."""

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
            for peak in [found[grids[0].coords["stage"]]]
        ]
        return JobMemory(job.samples, plan, profile, draft, places)


def _system(plan: Plan, optimizer: str) -> System:
    """Return the System constants without optimizer state, whose exact size is added later by ``_kinds``."""
    known = replace(ECHELON, state={optimizer: 0.0})
    if plan.low_memory is None:
        return known
    # low_memory frees each gradient at once, and its weights are already in 16 bits, so no cast copies exist
    return replace(known, amp_weights=2.0, amp_gradients=0.0)


def _is_long(plan: Plan) -> bool:
    several = bool(plan.recompute_chains) or any(len(names) > 1 for names in plan.recompute)
    return several and plan.mesh.get("stage", 1) == 1


def _in_long_segments(plan: Plan, profile: Profile, draft: Draft, peak: PeakMoment) -> PeakMoment:
    """Correct the peak if several modules are recomputed as one segment, which a draft cannot express.

    The saved activations are known; all activations of the largest segment are added, for when it is recomputed.
    """
    if not _is_long(plan):
        return peak
    samples = samples_of(draft)
    kept, plain = (
        kept_by_stage(profile, each, samples)[0] for each in (plan, replace(plan, recompute=(), recompute_chains=()))
    )
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
    if plan.low_memory is not None:
        kinds["gradients"] = holding.largest
        kinds["transient"] += LOW_MEMORY_ON_CPU * min(holding.largest // 2, AT_ONCE) if place == "cpu" else 0
        kinds["exchange"] += (UNDER_WAY + 1) * 2 * holding.largest if plan.ranks > 1 else 0  # all-reduce is in fp32
    elif plan.gradient_merge > 1 and plan.pipeline is not None:
        kinds["gradients"] = max(kinds["gradients"], holding.total("whole"))  # gradients of earlier batches
    elif plan.gradient_merge > 1 and plan.shard is not None and plan.shard.level > 1:
        kinds["gradients"] += holding.total("gradients")
    return kinds


def _in_words(profile: Profile, peak: PeakMoment) -> str:
    """Return the moment of the peak as text: ``backward of layers.3``."""
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
    """Return the micro-batches in flight for each stage of a rank, when their saved activations are largest.

    stage:  rank along the stage axis
    kept:   bytes saved per micro-batch, by stage
    """
    from echelon.planner.cost.in_flight import moments_of_rank

    own = list(range(stage, draft.stages, draft.stage))
    if draft.stage == 1:
        return dict.fromkeys(own, 1)
    found = moments_of_rank(draft.schedule or "1f1b", draft.stages, draft.stage, draft.micro_batches, stage)
    counts = [[n + (at == one.chunk) for at, n in enumerate(one.open)] for one in found if one.kind in "FB"]
    most = max(counts, key=lambda each: sum(n * kept.get(at, 0) for n, at in zip(each, own, strict=True)))
    return dict(zip(own, most, strict=True))


def samples_of(draft: Draft) -> int:
    """Return the samples of a micro-batch, rounded up."""
    return max(1, math.ceil(draft.micro_batch - 1e-9))
