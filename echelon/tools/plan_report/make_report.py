"""Search for a plan, or load a saved one, and make a PlanReport about it."""

from __future__ import annotations

import dataclasses
import time

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.prediction import Prediction
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.apply.save_plan import make_saved_plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cost.predict import predict
from echelon.planner.cost.system import ECHELON, STATE, System
from echelon.planner.default_run import DefaultRun, capabilities_of, find_default_run
from echelon.planner.plan_search.helpful_techniques import would_help
from echelon.planner.plan_search.neighbours import neighbours
from echelon.planner.plan_search.search import PlanSearch, search
from echelon.planner.plan_search.search_result import PlanChoice, SearchResult
from echelon.planner.profiling.named_optimizers import NAMED, named_optimizer
from echelon.planner.profiling.optimizer_state import optimizer_name, with_state_of
from echelon.tools.plan_report import build_report, sensitivity
from echelon.tools.plan_report.model_source import ModelSource
from echelon.tools.plan_report.plan_options import PlanOptions, PlanReportOptions
from echelon.tools.plan_report.report_data import PlanReport


def make_report(options: PlanOptions, cluster: Cluster, source: ModelSource, orders: PlanReportOptions) -> PlanReport:
    """Search for the best plan, or load the saved one, and return the complete report."""
    options = dataclasses.replace(
        options, batch=options.batch or source.profile.batch, optimizer=options.optimizer or "adam"
    )
    usual = _usual(options, source, cluster)
    planner = ReportPlanner(options, source, usual, usual.runtime(_system(options, source)))
    before = SavedPlan.load(orders.explain).draft if orders.explain else None
    begin = time.process_time()
    answer = planner.again(before, cluster) if before else planner.best(cluster)
    costs = time.process_time() - begin
    report = build_report.build_plan_report(source.profile, cluster, planner.batch, answer, options.to_dict())
    first = before or (answer.best[0].draft if answer.best else None)
    report = dataclasses.replace(report, runs_as=str(usual if first is None else usual.of_draft(first)))
    if not answer.best:
        return report
    chosen = answer.best[0]
    if orders.save:
        _save(orders.save, chosen, options, source)
    same = planner.same(chosen.draft, cluster)
    ask = same if before else sensitivity.SensitivitySearch(planner.other, same, costs)
    return dataclasses.replace(
        report,
        options=(planner.drawn(chosen, cluster), *answer.best[1:]),
        sensitivities=sensitivity.sensitivities(chosen, cluster, ask),
        sizes=sensitivity.sizes(chosen, cluster, ask) if orders.sizes else (),
    )


def _usual(options: PlanOptions, source: ModelSource, cluster: Cluster) -> DefaultRun:
    """Return what a run would do on these devices, in the precision that --amp names."""
    usual = find_default_run(source.profile.model, None, {}, capabilities_of(cluster), source.strategy)
    return (
        usual if options.amp is None else dataclasses.replace(usual, amp=None if options.amp == "off" else options.amp)
    )


def _system(options: PlanOptions, source: ModelSource) -> System:
    """Return ECHELON with the state size of the script's own optimizer, or of a NAMED optimizer that STATE lacks."""
    name, model = options.optimizer, source.profile.model
    if source.optimizers is not None and name == optimizer_name(source.optimizers):
        return with_state_of(ECHELON, source.optimizers, model)
    if name is None or name in STATE or name not in NAMED:
        return ECHELON
    return with_state_of(ECHELON, named_optimizer(name, model.parameters()), model)


@dataclasses.dataclass(frozen=True)
class ReportPlanner:
    """Searches and predictions of one command: all for the same model and with the same options."""

    options: PlanOptions
    source: ModelSource
    usual: DefaultRun
    system: System = ECHELON

    @property
    def batch(self) -> int:
        assert self.options.batch is not None
        return self.options.batch

    @property
    def optimizer(self) -> str:
        assert self.options.optimizer is not None
        return self.options.optimizer

    def best(self, cluster: Cluster) -> SearchResult:
        return self._search(cluster, self.batch, self.options.keep)

    def other(self, cluster: Cluster, batch: int) -> SearchResult:
        return self._search(cluster, batch, 1)

    def _search(self, cluster: Cluster, batch: int, keep: int) -> SearchResult:
        return search(
            self.source.profile,
            cluster,
            batch=batch,
            allow=self.options.allow,
            optimizer=self.optimizer,
            system=self.system,
            usual=self.usual,
            keep=keep,
        )

    def again(self, draft: Draft, cluster: Cluster) -> SearchResult:
        """Return a search result whose best plan is the given draft.

        Raises UsageError if the draft needs more devices than the cluster has.
        """
        if draft.ranks > cluster.size:
            raise UsageError(f"the plan is for {draft.ranks} devices, and {cluster} has {cluster.size}; give --cluster")
        plan_search = PlanSearch(
            self.source.profile,
            cluster,
            draft.batch,
            self.options.allow,
            self.optimizer,
            self.system,
            {},
            usual=self.usual.of_draft(draft),
        )
        plan_search.explore(beyond_host=False)  # neighbours() picks the best plan of each kind from what this finds
        choice = PlanChoice(draft, self._predict(draft, cluster, events=False))
        rejected, helps = tuple(neighbours(plan_search, choice)), tuple(would_help(plan_search, choice))
        return SearchResult((choice,), rejected, 0, 0.0, helps, notes=tuple(plan_search.notes(choice)))

    def same(self, draft: Draft, here: Cluster) -> sensitivity.Ask:
        """Return a function that predicts this plan on another cluster, without a search.

        The plan uses the same fraction of the devices there: devices idle on ``here`` stay idle.
        """

        def ask(cluster: Cluster, batch: int) -> SearchResult:
            there = sensitivity.spread(draft, draft.ranks * cluster.size // here.size, batch)
            if there is None:
                return SearchResult(best=(), rejected=(), considered=0, seconds=0.0)
            choice = PlanChoice(there, self._predict(there, cluster, events=False))
            return SearchResult(
                best=(choice,) if choice.prediction.fits else (), rejected=(), considered=1, seconds=0.0
            )

        return ask

    def drawn(self, choice: PlanChoice, cluster: Cluster) -> PlanChoice:
        """Return the choice with the events of its timeline added."""
        timed = self._predict(choice.draft, cluster, events=True)
        return PlanChoice(choice.draft, dataclasses.replace(choice.prediction, events=timed.events))

    def _predict(self, draft: Draft, cluster: Cluster, *, events: bool) -> Prediction:
        return predict(self.source.profile, cluster, draft, system=self.system, optimizer=self.optimizer, events=events)


def _save(path: str, choice: PlanChoice, options: PlanOptions, source: ModelSource) -> None:
    make_saved_plan(
        choice.draft,
        source.profile,
        model=source.model,
        cluster=options.cluster,
        prediction=choice.prediction,
        made_from=options.to_dict(),
    ).save(path)
