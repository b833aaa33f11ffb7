"""Estimate the peak memory of each rank: exact resident bytes, plus the planner's estimate for computation."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from echelon.distributed.mesh_groups import MeshGroups
from echelon.plan import Plan
from echelon.plan.draft import Draft
from echelon.planner.cost.draft_of_plan import stepping_optimizer
from echelon.planner.cost.rank_memory import PeakMoment, find_peak_moments, samples_of
from echelon.planner.cost.system import ECHELON
from echelon.planner.profiling.optimizer_state import optimizer_name
from echelon.planner.profiling.profile import Profile
from echelon.strategy.annotations.marks import within
from echelon.tools.memory_profile.resident import ResidentEstimator, ResidentMemory
from echelon.tools.memory_profile.saved_activations import kept_by_stage, segments_of
from echelon.tools.memory_profile.training_job import JobPlanner, Optimizers, TrainingJob

#: The parts of the peak, with the field names of PredictedMemory.
KINDS = ("parameters", "gradients", "optimizer", "activations", "transient", "exchange", "buffers")


@dataclasses.dataclass(frozen=True)
class RankGroupPeak:
    """A group of ranks with equal memory.

    grids:    the ranks' views of the mesh
    resident: resident memory of each of these ranks
    kinds:    bytes at the peak by kind (see KINDS)
    moment:   the moment of the peak as text
    """

    grids: list[MeshGroups]
    resident: ResidentMemory
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
        self._planner, self._resident_estimator = (
            JobPlanner(profile, optimizers),
            ResidentEstimator(profile.model, optimizers),
        )
        self._name = optimizer_name(optimizers)

    def spread(self, job: TrainingJob) -> JobMemory:
        plan = self._planner.plan(job)
        profile, draft = self._planner.draft_for_plan(plan, job.samples)
        draft = draft.replaced(recompute=()) if _is_long(plan) else draft
        optimizer = stepping_optimizer(plan, self._name)
        found = find_peak_moments(
            profile,
            draft,
            system=replace(ECHELON, state={optimizer: 0.0}),  # the exact size is known
            optimizer=optimizer,
            place=profile.device,
            merge=plan.gradient_merge,
            low_memory=plan.low_memory is not None,
        )
        found = tuple(_in_long_segments(plan, profile, draft, peak) for peak in found)
        places = [
            RankGroupPeak(grids, resident, _kinds(resident, peak), _in_words(profile, peak))
            for grids, resident in self._resident_estimator.of(plan)
            for peak in [found[grids[0].coords["stage"]]]
        ]
        return JobMemory(job.samples, plan, profile, draft, places)


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


def _kinds(resident: ResidentMemory, peak: PeakMoment) -> dict[str, int]:
    kinds = {kind: round(getattr(peak.memory, kind)) for kind in KINDS}
    return kinds | {kind: resident.total(kind) for kind in ("parameters", "optimizer")}


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
