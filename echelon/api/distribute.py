"""``distribute()``: builds an Engine from a model, its optimizer and a strategy, the same on every rank."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.api.call_arguments import Optimizers, as_checkpoint, as_nonfinite, check_types, name_optimizers, sort_given
from echelon.api.distribute_args import DistributeArgs
from echelon.api.model_makers import made_model, made_optimizer
from echelon.base.environment import COPIES, PLAN_ONLY, VERIFY, whole_number
from echelon.base.errors import UsageError, nearest
from echelon.base.start_times import start_times
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.construction.deferred_weights import DeferredWeights
from echelon.distributed import world as worlds
from echelon.distributed.world import World
from echelon.engine.deferred_engine import DeferredEngine
from echelon.engine.elastic import Elastic, fit_to_ranks, rule_in_force
from echelon.engine.engine import Engine, begin
from echelon.engine.lr_schedules import AnyScheduler, listed
from echelon.engine.on_nonfinite import Action, OnNonfinite
from echelon.engine.planned_run import PlannedRun
from echelon.engine.preconditions import check_model, check_optimizers
from echelon.engine.run_context import RunContext
from echelon.engine.server_backend import NoServers, ServerBackend
from echelon.engine.wrapped_models import unwrap
from echelon.fastpath.inspect import choose_fast_path
from echelon.nn import SparseEmbedding
from echelon.observability.metrics import Log
from echelon.observability.runlog.run_description import strategy_settings
from echelon.observability.stall.reporter import report
from echelon.parallel.data.sync_batch_norm import make_local
from echelon.parallel.objective import LossFunction, as_batch
from echelon.plan import Plan, make_plan
from echelon.plan.axes import requested_slice
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.apply.auto import AutoPlanner, find_saved, origin_of, refuse_settings_beside_plan
from echelon.planner.apply.trial import Trial, find_trial
from echelon.strategy import Auto, Lora, ParameterServer, Strategy
from echelon.strategy.annotations.annotate import ModelMarks, collect
from echelon.strategy.annotations.slices import Slices
from echelon.strategy.annotations.slices import current as current_cluster

if TYPE_CHECKING:
    from echelon.tools.verify.observer import VerifyObserver


def distribute(
    model: nn.Module | Callable[[], nn.Module],
    *given: Optimizers | Callable[..., Any] | Strategy | None,
    optimizer: Optimizers | Callable[[nn.Module], Optimizers] | None = None,
    loss: LossFunction | None = None,
    scheduler: AnyScheduler | Sequence[AnyScheduler] | None = None,
    strategy: Strategy | None = None,
    plan: Plan | SavedPlan | str | Path | None = None,
    cluster: Slices | None = None,
    sample: Any = None,
    checkpoint: Checkpoint | str | Path | None = None,
    elastic: Elastic | None = None,
    log: Log | None = None,
    on_nonfinite: OnNonfinite | Action = "stop",
    **unknown: Any,
) -> Engine:
    """Distribute ``model`` over the processes of the job and return the engine that trains it.

    model:      torch module, the same on every process; or a function that makes it, called in ``echelon.deferred()``
    given:      optimizer, loss and strategy as positional arguments in any order; their types tell them apart
    optimizer:  one optimizer, or several as a list or a dict (user code then calls ``backward`` and ``update``); or by
                name a function that makes them from the model
    loss:       function called as ``loss(output, target)``; ``None`` if the model returns its own loss
    scheduler:  scheduler stepped after every optimizer step; ``echelon.per_epoch(scheduler)`` is stepped every epoch
    strategy:   ``echelon.Strategy`` with sharding, mixed precision, gradient accumulation and more; default: plain
                data parallelism with the fast path
    plan:       Plan to run instead of the one made from ``strategy``; or a saved plan, or the path of one
    cluster:    devices that make up one replica of an annotated model; default: all devices
    sample:     batch as ``step`` will get it: a pipeline is partitioned with it now, instead of with the first batch;
                with ``auto`` the plan is found with it
    checkpoint: directory and interval of automatic checkpoints; the same command resumes from them. A path alone
                means ``Checkpoint(dir=path)``
    elastic:    rule for batch size and learning rate when training resumes on another number of ranks; default: the
                rule applies if the launcher lets hosts join and leave (docs/elastic.md)
    log:        ``echelon.Log`` with the console output and the files to write; default: one line per ten steps
    on_nonfinite: reaction to a loss or gradients that are NaN or infinite: "stop" (default), "skip", "rollback", or an
                OnNonfinite
    unknown:    refused, with the nearest known option

    >>> engine = echelon.distribute(model, optimizer, loss=F.cross_entropy, strategy=echelon.Strategy(shard=1))
    >>> for x, y in engine.loader(dataset, global_batch=64):
    ...     loss = engine.step(x, y)  # forward, backward and the optimizer's step
    """
    for name in unknown:
        raise UsageError(f"distribute() has no option '{name}'{nearest(name, _OPTIONS)}")
    model = made_model(model)
    start_times.end("build")
    optimizer, loss, strategy = sort_given(given, optimizer=optimizer, loss=loss, strategy=strategy)
    optimizer = made_optimizer(optimizer, model)
    check_types(model, optimizer, loss, strategy, plan, cluster, elastic, log)
    checkpoint = as_checkpoint(checkpoint)
    model, unwrapped = unwrap(model)
    strategy, adapted = _adapted(model, strategy, optimizer)
    requested = strategy or Strategy()
    found = _mark(model, requested, loss, sample)
    if PLAN_ONLY in os.environ:
        DeferredWeights(model, torch.device("cpu"))
        from echelon.tools.plan_report.planning_engine import make_planning_engine

        return make_planning_engine(  # type: ignore[no-any-return]
            model,
            optimizer=optimizer,
            loss=loss,
            scheduler=scheduler,
            strategy=strategy,
            plan=plan,
            cluster=cluster,
            sample=sample,
        )
    world = worlds.current()
    check_model(model)
    initial = DeferredWeights(model, world.device)
    model.to(world.device)
    make_local(model)
    observer, trial = _observer(model, strategy), find_trial()
    optimizers = name_optimizers(optimizer)
    check_optimizers(optimizers)
    backend = _backend(model, requested, optimizers, world)
    if not isinstance(backend, NoServers):
        initial.fill()  # servers get whole weights from a worker
    world = _world_of(backend, world)
    terms = DistributeArgs(requested, collect(model), plan, cluster, elastic)
    terms = terms if observer is None else observer.terms(terms)
    resolved = _resolve(terms, world, model, loss, optimizers, backend, found=trial is not None)
    if trial is not None or observer is not None:  # trials and verification write no checkpoints and no logs
        checkpoint, log = None, Log(console=False)
    run = RunContext(
        world=world,
        model=model,
        loss=loss,
        optimizers=optimizers,
        schedulers=listed(scheduler),
        checkpoint=checkpoint,
        log=log or Log(),
        backend=backend,
        elastic=resolved.rule,
        make_engine=Engine if observer is None else observer.make_engine,
        initial=initial,
        trial=trial,
        on_nonfinite=OnNonfinite() if trial is not None else as_nonfinite(on_nonfinite),
    )
    run.record.settings(strategy_settings(resolved.strategy))
    report(world)
    for line in filter(None, (*found, unwrapped, *adapted, resolved.reshaped, *initial.notices)):
        run.say(line)
    batch = None if sample is None else as_batch((sample,), {}, world.device)
    engine = _engine(run, resolved, terms.plan, batch, DeferredEngine if observer is None else observer.defer)
    engine.resume()
    backend.begin()
    if trial is None and (checkpoint is not None or _copies(backend)):
        run.preemption.install()
    if observer is not None:
        observer.attach(engine)
    start_times.end("distribute")
    return engine


_OPTIONS = tuple(name for name in distribute.__annotations__ if name not in ("given", "unknown", "return"))


@dataclass(frozen=True)
class ResolvedConfig:
    """The configuration resolved for the current world size.

    plan:     plan made from strategy and marks; provisional if a ``saved`` plan or ``auto`` replaces it
    saved:    saved plan or the plan of a file; None without one
    rule:     elastic rule in force; None without one
    reshaped: log line if the ranks do not fit the requested mesh; None otherwise
    """

    strategy: Strategy
    marks: ModelMarks
    plan: Plan
    saved: SavedPlan | None
    rule: Elastic | None
    reshaped: str | None


def _resolve(
    terms: DistributeArgs,
    world: World,
    model: nn.Module,
    loss: LossFunction | None,
    optimizers: Mapping[str, torch.optim.Optimizer],
    backend: ServerBackend,
    found: bool,
) -> ResolvedConfig:
    """Resolve strategy, marks and plan for the current world size.

    found: True if this process times a candidate of ``auto``
    """
    requested, marks = terms.strategy, terms.marks
    saved, here = find_saved(terms.plan), world.ranks_per_host
    found = found or saved is not None or bool(requested.auto)
    if found:
        refuse_settings_beside_plan(requested, marks, terms.cluster, backend.pushes, planned=saved is not None)
    rule = rule_in_force(terms.elastic, by_servers=backend.dense)
    slices = _slices(terms, rule)
    marks, slices, reshaped = fit_to_ranks(rule, marks, slices, world.mesh_size, here)
    if reshaped is not None:  # these numbers do not fit the ranks
        requested = dataclasses.replace(requested, split=None, stages=None)
    plan = make_plan(model, optimizers, requested, world.mesh_size, here, marks, slices)
    if not found:  # a plan that was found already includes its fast path
        plan = choose_fast_path(plan, requested, world, model, optimizers, backend.pushes, loss)
    return ResolvedConfig(requested, marks, plan, saved, rule, reshaped)


def _mark(model: nn.Module, requested: Strategy, loss: LossFunction | None, sample: Any) -> list[str]:
    """Put the marks of ``split`` and ``stages`` on the model, and return log lines about them."""
    if requested.split is None and requested.stages is None:
        return []
    from echelon.planner.apply.requested_marks import apply_requested_marks

    ranks = 2 if PLAN_ONLY in os.environ else worlds.current().mesh_size
    return apply_requested_marks(model, requested, ranks, sample, loss)


def _slices(terms: DistributeArgs, rule: Elastic | None) -> Slices:
    """Return the rule that groups ranks into slices; elastic training starts from the size that ``split`` asks for."""
    slices = terms.cluster or current_cluster()
    wanted = requested_slice(terms.strategy.split, terms.marks.stages, terms.marks.pipeline)
    return Slices(average=wanted) if rule is not None and wanted and slices == Slices() else slices


def _engine(
    run: RunContext, resolved: ResolvedConfig, given: Any, batch: Any, defer: Callable[..., DeferredEngine]
) -> Engine:
    """Return the engine; a deferred one if a pipeline or ``auto`` waits for a batch that is not there yet.

    given: plan that ``distribute`` was given
    defer: creates the deferred engine
    """
    auto = _described(resolved.strategy.part(Auto), resolved.rule, run.world.size)
    planner = AutoPlanner(auto, run.world, run.model, run.loss, run.optimizers, run.say, resolved.strategy)
    if isinstance(run.trial, Trial):
        planned = PlannedRun(run, *planner.realized(run.trial.candidate))
    elif resolved.saved is not None:
        planned = PlannedRun(run, *planner.realized(resolved.saved, origin_of(given)))
    elif resolved.strategy.auto is None:
        plan = _checked(given, resolved.plan) if isinstance(given, Plan) else resolved.plan
        planned = PlannedRun(run, plan, resolved.marks)
    elif batch is not None:
        planned = PlannedRun(run, *planner.by_sample(batch))
    else:
        return defer(run, resolved.plan, finder=planner)
    engine = begin(planned, batch)
    _say_what_is_idle(run, resolved.strategy, planned.plan)
    return defer(run, planned.plan, planned=planned) if engine is None else engine


def _adapted(model: nn.Module, strategy: Strategy | None, optimizer: Optimizers) -> tuple[Strategy | None, list[str]]:
    """Give the model the adapters that the strategy requests, and log lines on them; change nothing without."""
    lora = None if strategy is None else strategy.part(Lora)
    if strategy is None or lora is None:
        return strategy, []
    from echelon.parallel.lora.adapt import adapt

    seed = 0 if PLAN_ONLY in os.environ else worlds.current().seed
    lora, lines = adapt(model, lora, name_optimizers(optimizer), seed)
    return dataclasses.replace(strategy, lora=lora), lines


def _observer(model: nn.Module, strategy: Strategy | None) -> VerifyObserver | None:
    """Return the observer if ``echelon verify`` has started this process, else None."""
    if VERIFY not in os.environ:
        return None
    from echelon.tools.verify.attach import find_verify_observer

    return find_verify_observer(model, strategy)


def _described(auto: Auto | None, rule: Elastic | None, ranks: int) -> Auto | None:
    """Drop the cluster description of ``auto`` if elastic training runs on another number of ranks.

    The plan is then found for the devices that are present.
    """
    if auto is None or auto.cluster is None or rule is None:
        return auto
    from echelon.planner.cluster.cluster import Cluster

    return auto if Cluster.parse(auto.cluster).size == ranks else dataclasses.replace(auto, cluster=None)


def _copies(backend: ServerBackend) -> bool:
    """Return True if launchers hold in-memory snapshots of the ranks; servers keep the state of their own workers."""
    return whole_number(os.environ, COPIES, 0) > 0 and not backend.dense


def _say_what_is_idle(run: RunContext, requested: Strategy, plan: Plan) -> None:
    if run.world.mesh_size > 1 and requested.shard and plan.shard is None:
        run.say("shard: there is nothing to share out, since all ranks make up one copy of the model")


def _backend(
    model: nn.Module, strategy: Strategy, optimizers: Mapping[str, torch.optim.Optimizer], world: World
) -> ServerBackend:
    """Return a parameter-server session if the strategy, the job or a sparse table needs one, else ``NoServers``."""
    requested, alone = strategy.part(ParameterServer), world.role.role == "alone"
    if requested is None and alone and not _has_tables(model):
        return NoServers()
    if alone and world.size > 1:
        return _collective(model, strategy, world)
    if requested is not None and requested.mode == "collective" and not alone:
        raise UsageError(
            "ps='collective' keeps tables in the workers, and this job has parameter servers; start it with 'echelon "
            f"run --procs {world.size} ...', or choose another mode, such as ps='sync'"
        )
    from echelon.parameter_server.worker.device_session import session_of

    session = session_of(requested or ParameterServer(), world, model)
    if session.dense and len(optimizers) > 1:
        raise UsageError("parameter servers run one optimizer; give one, or ParameterServer(dense='allreduce')")
    return session


def _collective(model: nn.Module, strategy: Strategy, world: World) -> ServerBackend:
    """Return the session of a job of several processes without servers, whose workers hold the tables."""
    requested = strategy.part(ParameterServer)
    if requested is not None and requested.mode != "collective":
        raise UsageError(
            f"this job has {world.size} processes and no parameter servers, which ps='{requested.mode}' needs; start "
            f"it with 'echelon run --servers 1 --workers {world.size} ...', or use ps='collective', which needs none"
        )
    from echelon.parameter_server.worker.collective_session import CollectiveSession

    if requested is None:  # the default refuses what does not combine with it, as if it had been asked for
        requested = dataclasses.replace(strategy, ps="collective").part(ParameterServer)
    assert requested is not None
    return CollectiveSession(requested, world, model)


def _has_tables(model: nn.Module) -> bool:
    return any(isinstance(module, SparseEmbedding) for module in model.modules())


def _world_of(backend: ServerBackend, world: World) -> World:
    """Return the world that this process trains in.

    Workers whose dense parameters are all-reduced form one process group; others are connected through servers only.
    """
    if backend.dense:
        return world.without_collectives()
    return worlds.bind() if world.role.endpoints else world


def _checked(given: Plan, made: Plan) -> Plan:
    if given.ranks != made.ranks:
        raise UsageError(f"the plan is for {given.ranks} ranks, this job has {made.ranks}; start it with that many")
    if given.model != made.model:
        raise UsageError("the plan was made for another model; make a new one")
    return given
