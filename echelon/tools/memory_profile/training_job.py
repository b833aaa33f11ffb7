"""TrainingJob: the training options that memory depends on; JobPlanner: the Plan that a run with them would make."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from echelon.base.config import require, strict
from echelon.base.errors import UsageError
from echelon.fastpath.inspect import requested_fast_path, traits_of, with_fast_path
from echelon.fastpath.policy import DeviceCapabilities, decide
from echelon.plan import Plan, make_plan
from echelon.plan.draft import Draft
from echelon.plan.partition import balance_stages
from echelon.plan.saved_plan import SavedPlan
from echelon.plan.stage_trace import StageTrace, record
from echelon.planner.apply.realize import complete_saved_plan, saved_plan_inputs
from echelon.planner.cost.draft_of_plan import draft_of
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_step import batch_placeholders
from echelon.planner.profiling.profile import Profile
from echelon.strategy import Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.marks import Pipeline, Split
from echelon.strategy.annotations.slices import Slices

Optimizers = Mapping[str, torch.optim.Optimizer]


@strict
class TrainingJob:
    """The training options that memory depends on.

    samples:  samples of the batch that each replica gets in a step
    procs:    number of processes; several of them form a replica if the marks say so
    strategy: the strategy that a script would pass to ``distribute``
    marks:    marks of the model, if parts of it are split or staged
    slices:   which processes form a copy of the model
    mesh:     sizes of the mesh axes, if they are already decided
    saved:    the saved plan that the job was made from, if any
    """

    samples: int
    procs: int = 1
    strategy: Strategy = Strategy()
    marks: ModelMarks | None = None
    slices: Slices | None = None
    mesh: dict[str, int] | None = None
    saved: SavedPlan | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "procs"):
            require(getattr(self, name) >= 1, self, name, "1 or more")

    @classmethod
    def of(cls, saved: SavedPlan, samples: int | None = None) -> TrainingJob:
        """Return the job of a saved plan. ``samples`` of each replica default to those of the plan."""
        strategy, marks, slices, mesh = saved_plan_inputs(saved)
        each = math.ceil(saved.draft.batch / saved.draft.replicate)
        return cls(
            samples=each if samples is None else samples,
            procs=saved.draft.ranks,
            strategy=strategy,
            marks=marks,
            slices=slices,
            mesh=mesh,
            saved=saved,
        )

    def replaced(self, **changes: object) -> TrainingJob:
        """Return the job with other options of its strategy."""
        strategy = dataclasses.replace(self.strategy, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(self, strategy=strategy)


class JobPlanner:
    """Makes plans for jobs of one model. A forward pass is recorded once for each partition into stages."""

    def __init__(self, profile: Profile, optimizers: Optimizers) -> None:
        self._profile, self._optimizers = profile, optimizers
        self._recorded: dict[Any, StageTrace] = {}
        self._cut = functools.cache(self._profile_of)

    def plan(self, job: TrainingJob) -> Plan:
        """Return the plan that every rank would make for the job, including its stages."""
        model = self._profile.model
        plan = make_plan(
            model,
            self._optimizers,
            job.strategy,
            ranks=job.procs,
            ranks_per_host=job.procs,
            marks=job.marks,
            cluster=job.slices,
            mesh=job.mesh,
        )
        plan = self._with_fast_path(plan, job)
        if job.saved is not None:
            whole = complete_saved_plan(plan, job.saved, model)
            plan = dataclasses.replace(whole, recompute=plan.recompute or whole.recompute)
        if plan.mesh.get("stage", 1) == 1:
            return plan
        assert plan.pipeline is not None
        units = job.marks.units if job.marks else {}
        key = (tuple(units.items()), plan.pipeline.stages, plan.mesh["stage"], plan.pipeline.weights)
        if key not in self._recorded:
            rows = math.ceil(job.samples / plan.pipeline.micro_batches)
            self._recorded[key] = self._record(plan.pipeline, units, plan.pipeline.stages or plan.mesh["stage"], rows)
        return dataclasses.replace(plan, stages=self._recorded[key])

    def _with_fast_path(self, plan: Plan, job: TrainingJob) -> Plan:
        """Apply the fast path's decisions, such as bf16 by default on a GPU.

        CUDA graphs are left out.
        """
        if self._profile.device != "cuda" or job.saved is not None:
            return plan
        requested = dataclasses.replace(requested_fast_path(job.strategy), graphs=False)
        amp = job.strategy.amp if job.strategy.amp is not None else plan.amp
        traits = traits_of(
            plan, DeviceCapabilities(cuda=True, bf16=True, triton=True), self._profile.model, self._optimizers, False
        )
        return with_fast_path(plan, decide(requested, amp, traits))

    def _record(self, pipeline: Pipeline, units: Mapping[str, int], count: int, rows: int) -> StageTrace:
        model = FakeModel(self._profile.model, []).model
        batch = batch_placeholders(self._profile.placeholders(max(rows, 2)))  # at least 2: batch norm rejects one row

        def call(given: object) -> object:
            return self._profile.step(model, given)

        return record(call, model, batch, units or balance_stages(model, count, call, batch, pipeline.weights))

    # ---- for the planner's memory model ----

    def draft_for_plan(self, plan: Plan, samples: int) -> tuple[Profile, Draft]:
        """Return the plan as a draft, and a profile whose units can express its stages and splits."""
        splits, batch = tuple(plan.splits.items()), samples * plan.mesh["replicate"]
        profile = self._cut((), splits, plan.batch_per_split_rank) if splits else self._profile
        try:
            return profile, draft_of(plan, profile, batch)
        except UsageError:
            assert plan.stages is not None
        profile = self._cut(tuple(plan.stages.units), splits, plan.batch_per_split_rank)
        return profile, draft_of(plan, profile, batch)

    def _profile_of(self, units: tuple[str, ...], splits: tuple[tuple[str, Split], ...], spread: bool) -> Profile:
        return self._profile.cut(units, dict(splits), spread)
