"""A stand-in for the engine in a script run by ``echelon memory``: it reports the footprint at the first batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from echelon.base.config import build
from echelon.base.errors import EchelonError, UsageError
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.apply.auto import find_saved, refuse_settings_beside_plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.profiling.profile import Profile
from echelon.strategy import Strategy
from echelon.strategy.annotations.annotate import collect
from echelon.strategy.annotations.slices import Slices, current
from echelon.tools.memory_profile.footprint import find_footprint
from echelon.tools.memory_profile.memory_options import MemoryOptions
from echelon.tools.memory_profile.requested_job import cluster_for, job_by_plan, remark, requested_job
from echelon.tools.memory_profile.training_job import TrainingJob
from echelon.tools.plan_report.model_source import profile_model
from echelon.tools.plan_report.planning_engine import PlanningEngine


class FootprintEngine(PlanningEngine):
    """A PlanningEngine that answers with the memory footprint of the script's training."""

    def __init__(
        self,
        question: dict[str, Any],
        model: nn.Module,
        optimizer: Any,
        loss: Any,
        scheduler: Any = None,
        strategy: Strategy | None = None,
        plan: Plan | SavedPlan | str | Path | None = None,
        cluster: Slices | None = None,
    ) -> None:
        self._plan, self._slices = plan, cluster or current()
        self._marks = collect(model)
        super().__init__(question, model, optimizer, loss, scheduler, strategy)

    def _look_at(self, batch: Any) -> NoReturn:
        self._refuse_tables()
        try:
            options = build(MemoryOptions, self._question["footprint"], "options")
            cluster = Cluster.parse(cluster_for(options))
            profile = profile_model(self._model, batch, self._loss, name=Path(options.model).stem, cluster=cluster)
            job = self._job(options, profile)
            found = find_footprint(profile, job, options.optimizer or self._optimizer)
            found = replace(found, notes=(*remark(options, job), *found.notes))
        except EchelonError as error:
            self._answer({"error": str(error)})
        title = f"{profile.name}, {options.optimizer or type(self._first).__name__}"
        self._answer({"title": title, "footprint": found.to_json()})

    def _job(self, options: MemoryOptions, profile: Profile) -> TrainingJob:
        saved = SavedPlan.load(options.plan) if options.plan is not None else find_saved(self._plan)
        if saved is not None:
            refuse_settings_beside_plan(self._strategy, self._marks, None, served=False, planned=True)
            saved.check_model(self._model)
            return job_by_plan(options, saved)
        if self._strategy.auto:
            raise UsageError(
                "the script leaves its plan to auto, which finds it on the devices that are there; save one with "
                f"'echelon plan {options.model} --save plan.json' and give it as --plan plan.json"
            )
        if isinstance(self._plan, Plan):
            raise UsageError("the script gives distribute() a Plan, which is fixed to a number of ranks; give "
                             "strategy= and marks, or a saved plan")  # fmt: skip
        return requested_job(options, profile, self._strategy, self._marks, self._slices)

    @property
    def _first(self) -> Any:
        given = self._optimizer
        listed = list(given.values()) if hasattr(given, "values") else given
        return listed[0] if isinstance(listed, list | tuple) else listed
