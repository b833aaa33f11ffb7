"""``Engine``: trains one model. It connects the parts; each part is in a module of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from echelon.base.errors import LossError, UsageError
from echelon.base.mesh import AXES
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.data import Loader
from echelon.data.torch_loader import loader_request, refuse_unnamed
from echelon.distributed.activity import activity
from echelon.distributed.local_state import LocalState
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.process_groups import ProcessGroups
from echelon.distributed.replicas import broadcast_state
from echelon.distributed.world import World, seed_for_rank
from echelon.engine.checkpointing import CheckpointManager
from echelon.engine.collective_calls import check_same_plan, collective_call
from echelon.engine.consistency import ConsistencyChecker
from echelon.engine.custom_loop import OwnLoop
from echelon.engine.elastic import Elastic, ElasticState
from echelon.engine.ema import MovingAverage
from echelon.engine.forward_backward import ForwardBackward, refuse_own_loop
from echelon.engine.in_memory.checkpointer import MemoryCheckpointer
from echelon.engine.leftover_batches import epoch_leftover, run_leftover
from echelon.engine.loaders import LoaderFactory
from echelon.engine.local_gradients import LocalGradients
from echelon.engine.lr_schedules import AnyScheduler, LRSchedulers
from echelon.engine.parallelize import ParallelModel, parallelize
from echelon.engine.preemption import PreemptionHandler
from echelon.engine.replace_optimizers import replaced_decay
from echelon.engine.replica_buffers import replica_buffers
from echelon.engine.replica_sync import ReplicaSync
from echelon.engine.resume import StateRestorer
from echelon.engine.shutdown import ExitHook
from echelon.engine.startup_log import announcement, placement
from echelon.engine.update import OptimizerUpdate
from echelon.engine.whole_model import whole_state
from echelon.fastpath.fast_path import FastPath, fast_path, prepare
from echelon.observability.metrics import Log, MetricsLogger
from echelon.observability.metrics.run_logger import RunLogger
from echelon.observability.runlog.events import Kind
from echelon.observability.runlog.run_log_writer import RunLogWriter
from echelon.observability.trace.trace_session import TraceSession, requested_session
from echelon.optim.grad_scaler import check_precision
from echelon.parallel.data.batch_norm import stand_in_batch
from echelon.parallel.data.batch_rows import BatchRows
from echelon.parallel.data.global_loss import GlobalLoss, PipelineGlobalLoss
from echelon.parallel.evaluate import EvalOutput, Metric, evaluate
from echelon.parallel.kv_cache import CacheSwitch
from echelon.parallel.lr_scaling import rate_factor
from echelon.parallel.objective import LossFunction, Objective, as_batch, count_samples
from echelon.parallel.step_guard import StepGuard
from echelon.plan import Plan
from echelon.strategy.annotations.annotate import ModelMarks

if TYPE_CHECKING:
    from echelon.parallel.data.local_sgd import LocalSgdAverager
    from echelon.parameter_server.worker.session import ParameterServerSession
    from echelon.plan.saved_plan import SavedPlan
    from echelon.planner.apply.auto import AutoPlanner
    from echelon.planner.apply.trial import Trial


class Engine(OwnLoop):
    """Trains one model; created by ``echelon.distribute``. ``step(*batch)`` is a whole training step for any plan."""

    def __init__(
        self,
        world: World,
        groups: ProcessGroups,
        model: nn.Module,
        loss: LossFunction | None,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Sequence[AnyScheduler],
        plan: Plan,
        marks: ModelMarks,
        checkpoint: Checkpoint | None,
        log: Log,
        served: ParameterServerSession | None = None,
        choosing: AutoPlanner | None = None,
        elastic: Elastic | None = None,
        trial: Trial | None = None,
    ) -> None:
        self.world, self.model = world, model
        self.served = served  #: parameter-server session if tables or parameters live on servers
        self.worker = served.worker if served and served.dense else world.rank  #: index among the training processes
        self.trial = trial  #: set in a process that only times a candidate of ``auto``
        self._schedules = LRSchedulers(schedulers, optimizers.values(), self.say)
        #: output of the model in the last ``step(..., outputs=True)``; None on all stages of a pipeline but the last
        self.output: Any = None
        self.steps = 0  #: updates so far, including those skipped because of an overflow
        self.total_steps: int | None = None  #: steps shown on the console if the loop ends before its epochs do
        self.optimizers = dict(optimizers)  #: the optimizers that take the steps
        self._company = ConsistencyChecker(
            world, groups, lambda: self.steps + 1, lambda line: self.say(line, "warning")
        )
        self.answer_roll = self._company.answer_roll  #: called before each collective call
        self._one = ReplicaSync(model, self._company, served)
        self._given, self._judged_by = optimizers, loss  # the user's optimizers, which the schedulers drive
        self._guard = StepGuard(optimizers.values(), alone=world.size == 1 and served is None, say=self.say)
        self._choosing = choosing  # set until the plan is known
        self._parts: ParallelModel | None = None  # None until ``assemble``
        self._fast: FastPath | None = None
        self._caches: CacheSwitch | None = None  # None until ``begin``
        self._local: LocalSgdAverager | None = None
        self._loader: Loader | None = None
        self._leaving: PreemptionHandler | None = None
        self._log, self._watch = log, MetricsLogger(log, world.device, self.worker)
        self._clock = self._watch.clock
        self._timeline: TraceSession | None = requested_session(log, self._watch.directory)
        self.record = RunLogWriter(self._watch.directory, self.worker)  #: writes the run log
        self._voice = RunLogger(self._watch, self.record, speaks=self.worker == 0)
        self._beginning = ElasticState(elastic, world.size)
        self._take(plan, marks)
        self._keeper = CheckpointManager(world, self.stream, self._schedules, checkpoint)
        self._keeper.beginning = self._beginning
        self._keeper.saved = self._voice.saved
        self._keeper.claims.say, self._keeper.claims.writes = self.say, self.worker == 0
        self._memories: MemoryCheckpointer | None = None
        if trial is None and served is None:  # servers have their own journal
            self._memories = MemoryCheckpointer.find(
                world,
                keeper=self._keeper,
                company=self._company,
                statistics=self._one.has_local_statistics,
                say=self.say,
            )
        self._resuming = StateRestorer(world, self._keeper, served, self._memories, self._voice)
        #: moving average of the weights, which ``engine.ema(decay=0.999)`` starts
        self.ema = MovingAverage(world, self._company, self._one, self._keeper, served, lambda: self.steps, self.say)
        self._ending = ExitHook(self._finish)

    def _take(self, plan: Plan, marks: ModelMarks, found: SavedPlan | None = None) -> None:
        self.plan, self._marks = plan, marks
        self.found = found  #: plan from ``auto`` or a file; None if the plan was made from marks and strategy
        self._grid = MeshGroups(plan.mesh, plan.order, self.world.rank, self._company.groups)
        self.place = self._grid.coords  #: this rank's index along every axis of the mesh
        #: index of this rank's RNG stream; ranks that share a batch have the same one, so their dropout is equal
        self.stream = self.worker if plan.batch_per_split_rank or self.world.size == 1 else self._grid.ranks("split")[0]
        self._objective = Objective(self.model, self._judged_by, plan.amp, self.world.device)
        self._notices = replaced_decay(plan, self._given)
        self._feeding = LoaderFactory(
            self.world, plan, self._grid, self._beginning, self.served, by_rank=found is not None
        )
        self._company.is_fed = self._feeding.is_fed
        self._one.takes(plan, self._grid)
        alone = self.served is not None and self.served.dense and self.served.workers > 1
        self._rows = BatchRows(plan, self._grid, alone)

    def begin(self, plan: Plan, marks: ModelMarks, batch: Any = None, found: SavedPlan | None = None) -> None:
        """Start training with this plan, on all ranks together.

        plan:  plan to use
        marks: marks of the model
        batch: sample batch, to partition a pipeline now; default: the first batch of ``step``
        found: plan from ``auto`` or a file that ``plan`` was made from; None otherwise
        """
        check_precision(plan.amp, self.world.device)
        if self.world.control is not None:
            check_same_plan(plan, self.world.control)
            self._company.meet()
            broadcast_state(self.model)
        self._take(plan, marks, found)
        self._choosing, self._keeper.stream = None, self.stream
        self._caches = CacheSwitch(self.model, plan)
        self._notices += self._caches.notices
        if found is not None and found.predicted is not None:
            held = sum(value.untyped_storage().nbytes() for value in self.model.parameters())
            self._watch.foretell(found.predicted.seconds, found.predicted.memory[self.place["stage"]], held)
        if batch is not None or plan.mesh.get("stage", 1) == 1:
            self.assemble(batch)
        seed_for_rank(self.world.seed, self.stream)
        self.announce()
        self.record.begun(self)
        if self._timeline is not None:
            self._timeline.begin(self)

    def assemble(self, batch: Any = None) -> None:
        """Parallelize the model. A pipeline needs a batch, because it is partitioned by tracing a forward pass."""
        prepare(self.model, self.plan.fast)
        parts = parallelize(
            world=self.world,
            company=self._company,
            grid=self._grid,
            model=self.model,
            objective=self._objective,
            given=self._given,
            plan=self.plan,
            marks=self._marks,
            batch=batch,
        )
        self._parts, self.plan, self.optimizers = parts, parts.plan, parts.optimizers
        self._gradients, self._local = parts.gradients, parts.local
        if self.plan.low_memory is not None:
            from echelon.parallel.low_memory.adam import attend

            self._notices += attend(self.optimizers, lambda: self._rate_factor(self.steps + 1), lambda: self._memories)
        self._furnish(parts)
        for line in parts.remarks:
            self.say(line, "warning")
        if self._log.placement:
            for line in placement(self.plan, self._marks, self.world.place.local_world_size, parts.cut):
                self._watch.say(line)
        if self.served is not None:
            self.served.open(next(iter(self.optimizers.values())), parts.holdings.parameters)
            self.served.blob = lambda: self._keeper.pack_worker_state(self.steps + 1)
            self._ending.comes_first()  # it must run while the channels to servers are open
        self.steps = self._resuming.takes(parts, self.steps)
        self.record.assembled(self)

    def _furnish(self, parts: ParallelModel) -> None:
        """Create or update the parts of the engine that need the parallel model."""
        plan, grid = parts.plan, self._grid
        group = grid.group(*plan.data_axes, *(["stage"] if plan.stages else []))  # ranks with one global loss
        group = None if parts.local else group  # under local SGD ranks step alone
        parts.gradients.meet(group)
        self._fast = fast_path(plan, self.model, self._objective, self._given, self.say)
        self._rows.open()
        self._passes = ForwardBackward(
            world=self.world,
            grid=grid,
            parts=parts,
            objective=self._objective,
            fast=self._fast,
            group=group,
            clock=self._clock,
            rows=self._rows,
            say=self.say,
            served=self.served is not None,
        )
        self._updates = OptimizerUpdate(
            self.world, self._given, self._schedules, self.served, parts, self._company, self._guard
        )
        self._local_gradients = LocalGradients(parts, self._passes, self._reduce_early, self.say)
        self._company.takes(plan, grid, parts.local)
        self._one.local = parts.local
        self._passes.buffers = self._one.buffers = replica_buffers(
            model=self.model,
            plan=plan,
            grid=grid,
            control=self.world.control,
            company=self._company,
            say=lambda line: self.say(line, "warning"),
        )
        self._keeper.takes(parts)
        self.ema.takes(parts)
        activity.alike = grid.ranks(*(axis for axis in AXES if axis != "stage"))

    # ---- training ----

    @collective_call("data")
    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        """Run forward, backward, reduction, clipping and update; return the mean loss over the global batch.

        If ranks step alone (localsgd; parameter servers in async, bounded and geo mode), the result is the mean loss
        over this rank's batch. With ``gradient_merge``, the call that updates returns the mean over all accumulated
        batches.

        The weight of each rank in the mean is the count that its loss averages over: rows, or targets that are not
        ignored. ``samples`` sets this count if it cannot be found from the loss.

        With ``outputs=True``, ``engine.output`` is the output of the model for this rank's batch.
        """
        self._clock.lap("data")
        if self.trial is not None:
            self.trial.run(self, itertools.repeat((batch, named)))
        with self._company.explained():
            inputs = as_batch(batch, named, self.world.device)
            if self._fast is not None:
                inputs = self._fast.arrange(inputs)
            rows = self._feeding.rows(inputs, samples)
            self._assembled(inputs)
            self._company.compare(inputs)
            self._ask_outputs(outputs)
            self._schedules.before_pass(self._epoch)
            # rows of sparse tables are fetched before the forward pass and kept until the update
            with stand_in_batch(rows == 0), self.served.step(inputs) if self.served else contextlib.nullcontext():
                tally = self._pass(inputs, rows, samples)
            if outputs:
                self._take_outputs(inputs)
        return self._apply(self.optimizers, tally) if self._gradients.ready else tally.loss

    def backward(self, loss: Tensor, samples: float | None = None) -> None:
        """Accumulate the gradients of this loss in a user's own loop. They stay local until ``update`` or ``reduce``.

        samples: the same as in ``update``, but known before backward; synchronized batch norm needs it if the batches
                 of replicas have different sizes
        """
        self._need_plan()
        refuse_own_loop(self.plan, self.served is not None)
        self._schedules.before_pass(self._epoch)
        self._passes.add(loss, samples)
        self._local_gradients.added()

    def __call__(self, *batch: Any, **named: Any) -> NoReturn:
        """Raise ``UsageError``: other frameworks' engines are called like the model, this one is not."""
        raise UsageError("the engine is not the model; call engine.step(*batch) to train, or engine.model(...)")

    @property
    def has_own_loop(self) -> bool:
        """True if ``backward`` has been called."""
        return self._passes.has_own_loop

    @collective_call("communicate")
    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        """Reduce and clip gradients, step the named optimizer (or all), and drop all gradients, in a user's own loop.

        The weight of each rank in the mean is the count that its loss averages over. ``samples``, here or in
        ``backward``, sets this count if it cannot be found from the loss. If it is unknown, all ranks count equally.
        """
        self._need_plan()
        chosen = self._updates.chosen(optimizer)
        self._clock.lap("backward")
        self._local_gradients.about_to_reduce()
        with self._company.explained():
            tally = self._passes.reduce(chosen, samples, self.steps)
        self._clock.lap("communicate")
        self._apply(chosen, tally)

    @collective_call("evaluate")
    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        metrics: Mapping[str, Metric | str] | Sequence[str] = (),
        ema: bool = False,
    ) -> dict[str, float]:
        """Return mean loss and metrics over ``data``; every sample counts once.

        data:       dataset or tuple of tensors, divided among replicas; torch DataLoader, whose dataset, batch size
                    and collate function are used; or iterable of this rank's own batches
        batch_size: samples per replica; default 64
        collate:    function that makes a batch from samples
        metrics:    metrics by name, or their names
        ema:        True to evaluate the averaged weights
        """
        self._need_plan()
        self._feeding.taken()  # discards the sample count of an earlier batch
        batches = self._feeding.judged(data, batch_size, collate, self.say)
        with self.ema.applied() if ema else contextlib.nullcontext(), self._one.shown():
            results = evaluate(self.model, self._judge, batches, metrics, self.world, self._feeding.taken)
        prefix = "eval_ema_" if ema else "eval_"
        self._watch.note({"step": self.steps, **{f"{prefix}{name}": value for name, value in results.items()}})
        return results

    @collective_call("communicate")
    def synchronize(self) -> None:
        """Synchronize the model over replicas.

        Replicas that step alone (localsgd) are averaged. If servers hold the parameters, those are fetched. In all
        other cases replicas are equal already.
        """
        self._one.meet()

    def loader(
        self, dataset: Any, *sizes: Any, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """Return a loader of this rank's share of ``dataset``, or of a torch DataLoader's dataset.

        ``batch_size`` is per replica; ``global_batch``, given instead, is for all replicas together. With a plan from
        ``auto`` or from a file, ``batch_size`` is per rank, even if several ranks make up a replica. See
        ``echelon.data.Loader`` for the options.
        """
        refuse_unnamed(sizes)
        dataset, batch_size, global_batch, options, origin = loader_request(dataset, batch_size, global_batch, options)
        if origin:
            self.say(origin)
        batch_size, global_batch = self._beginning.sizes(batch_size, global_batch)
        if self._choosing is not None:
            self._choosing.plan_from_data(self, dataset, batch_size, global_batch, options)
        ahead = self.served.ahead if self.served else None
        loader = self._feeding.training(dataset, batch_size, global_batch, self.say, ahead, options)
        self._keeper.register(loader)
        self._loader = loader if self._loader is None else self._loader
        self._company.register_dataset(loader.likeness)
        self._tell(epoch_leftover(loader, self.plan.gradient_merge))
        if self.found is not None and self.found.draft.batch != loader.global_batch:
            self.say(f"the plan was made for a global batch of {self.found.draft.batch}; another may be quicker here")
        if self.trial is not None:
            self.trial.run(self, (((batch,), {}) for _ in itertools.count() for batch in loader))
        return loader

    @property
    def scheduler(self) -> Sequence[AnyScheduler]:
        """The schedulers that the engine steps."""
        return self._schedules.all

    @scheduler.setter
    def scheduler(self, given: AnyScheduler | Sequence[AnyScheduler]) -> None:
        """Set schedulers after ``distribute`` and before training, if they need the length of the loader."""
        self._schedules.attach_late(given)

    def _epoch(self) -> int | None:
        return None if self._loader is None else self._loader.epoch

    # ---- checkpoints ----

    @collective_call("save")
    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        """Write a checkpoint of the whole training state and return its path; all ranks call it together."""
        self._assembled()
        self._passes.losses.look()
        self.ema.before_save()
        own = self._keeper.own_state()
        with self._one.shown():
            return self._keeper.save(directory, self.steps, own, wait, self.served)

    @collective_call("communicate")
    def whole_state(self) -> dict[str, Tensor]:
        """Return the full state dict of the model, in host memory, on every rank. All ranks call it.

        Under ``split``, a pipeline or ``shard`` the ``model`` of a rank holds only parts of it.
        """
        parts = self._assembled()
        with self._company.explained(), self._one.shown():
            return whole_state(
                parts.holdings, self.world.control, self.plan.is_model_parallel or self.plan.shard is not None
            )

    @collective_call("load")
    def load(self, path: str | Path) -> None:
        """Load a checkpoint, or the newest one in a directory; any number of processes may have saved it."""
        self.ema.refuse("engine.load()")
        self.steps = self._resuming.load(path)

    def resume(self) -> None:
        """Resume from in-memory snapshots or from the newest checkpoint of ``distribute(checkpoint=...)``, if any."""
        self.steps = self._resuming.newest(self.steps)

    # ---- ending ----

    def close(self) -> None:
        """Finish background work and close connections; the engine cannot train afterwards. All ranks call it.

        Background work is also finished when the process exits.
        """
        self._ending.now()
        if self._caches is not None:
            self._caches.restore()
        self._guard.close()
        if self._parts is not None:
            self._local_gradients.close()
        self._company.close()
        self._keeper.close()

    def heed_signals(self) -> None:
        """Handle SIGTERM and SIGUSR1: after either signal to any rank, all ranks save and exit after the same step."""
        self._leaving = PreemptionHandler(self.world, self.worker)

    def _leave(self, leaving: PreemptionHandler) -> NoReturn:
        """Save and exit, on all ranks after the same step. A worker of parameter servers exits alone."""
        if self._memories is not None:
            self._memories.after(self.steps, at_once=True)
        if self._keeper.kept_in is not None:
            self.save(wait=True)
        leaving.leave(self.steps, self._keeper.kept_in, self.say)

    def _finish(self, error: BaseException | None) -> None:
        """Finish background work.

        error: exception that ends the process; None without one
        """
        if error is None and self._parts is not None:
            merged, waits = self._gradients.merged, self._passes.is_waiting
            self._tell(run_leftover(merged, self.plan.gradient_merge, waits))
        if self.served is not None:
            self.served.leave(error is None, self.say if self.worker == 0 else None)
        if self._timeline is not None:
            self._timeline.close(self)
        self._watch.close(error)
        self._keeper.wait()
        if self._memories is not None:
            self._memories.close()
        if self._leaving is not None:
            self._leaving.close()
        self.record.closed(self, error)

    # ---- inside a step ----

    def _assembled(self, batch: Any = None) -> ParallelModel:
        if self._choosing is not None and batch is not None:
            self._choosing.plan_from_batch(self, batch)
        self._need_plan()
        if self._parts is None:
            if batch is None:
                raise UsageError(
                    "the pipeline is cut by its first batch, and there was none; call step() first, or give "
                    "distribute(sample=batch)"
                )
            self.assemble(batch)
        assert self._parts is not None
        return self._parts

    def _need_plan(self) -> None:
        if self._choosing is not None:
            raise UsageError(
                "auto finds its plan with the first batch of engine.loader() or engine.step(), and there was none; "
                "begin with one of them, or give distribute(sample=batch)"
            )

    def _ask_outputs(self, asked: bool) -> None:
        """Start collecting outputs, or drop those of an earlier step."""
        self.output = self._objective.outputs = None
        if asked is not False:
            from echelon.parallel.step_outputs import asked_outputs

            self._objective.outputs = asked_outputs(asked)

    def _take_outputs(self, inputs: Any) -> None:
        gathered, self._objective.outputs = self._objective.outputs, None
        assert gathered is not None
        at_once = self._assembled().staged is None
        self.output = gathered.latest() if at_once else gathered.together(count_samples(inputs))

    def _pass(self, inputs: Any, rows: float, samples: float | None = None) -> GlobalLoss | PipelineGlobalLoss:
        return self._passes.run(inputs, rows, samples, self.steps, self._loss)

    def _loss(self, inputs: Any) -> Tensor:
        try:
            return self._objective(inputs)[1]
        except LossError as error:
            raise LossError(f"{self._company.here()}: {error}") from None

    def _judge(self, batch: Any) -> list[EvalOutput]:
        self._assembled(batch)
        with self._company.explained():
            return self._passes.judge(batch)

    def _apply(self, optimizers: Mapping[str, torch.optim.Optimizer], tally: GlobalLoss | PipelineGlobalLoss) -> Tensor:
        """Apply the reduced gradients and return the loss of the update."""
        samples, loss = self._examples(), self._passes.update_loss(tally)
        averages = self.ema.averages
        if averages is not None:
            self.ema.refuse("engine.step()")
        rate = self._updates.begin(optimizers)
        if not self._updates.empty:
            self._update_weights(optimizers, loss)
        elif self.served is not None:
            self.served.skip()
        for news in self._updates.end(self.steps + 1, tally.local, rate):
            self.say(f"step {self.steps + 1}: {news}")
        self.steps += 1
        activity.steps += 1
        if averages is not None:
            self.ema.update(optimizers)
        if self.served is not None and self.served.steps_together:
            with self._company.explained():
                loss = self.served.finish_step(loss)
            self._clock.lap("communicate")
        self._clock.lap("update")
        total = self._total_steps()
        if self._timeline is not None:
            with self._company.explained():
                self._timeline = self._timeline.after(self, total)
        self._watch.step(self.steps, loss, samples, rate * self._rate_factor(self.steps), total)
        if self._leaving is not None and self._leaving.due(self.steps, self._company.next_meeting):
            self._leave(self._leaving)
        if self._keeper.due(self.steps):
            self.save()
        if self._memories is not None:
            self._memories.after(self.steps)
        return loss

    def _examples(self) -> Tensor | float | None:
        """Return the samples of all ranks in all accumulated passes; None if their number is unknown.

        Ranks that step alone are assumed to have equal numbers of samples.
        """
        if not self._passes.counted:
            return None
        alone = self.plan.replicas if self._local else 1
        if self.served is not None and self.world.control is None:
            alone = self.served.workers
        return self._gradients.merged_rows * alone

    def _update_weights(self, optimizers: Mapping[str, torch.optim.Optimizer], loss: Tensor) -> None:
        if self._memories is not None:
            self._memories.hold()
        self._updates.weights(optimizers, self._rate_factor(self.steps + 1), loss)

    def _rate_factor(self, step: int) -> float:
        begun_with = self._beginning.first_replicas if self._beginning.rule else None
        return rate_factor(self.plan, step, begun_with) * self._beginning.factor

    def _total_steps(self) -> int | None:
        if self.total_steps is not None:
            return self.total_steps
        total = None if self._loader is None else self._loader.total_steps
        return total // self.plan.gradient_merge if total else None

    # ---- properties and log ----

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before backward; 1 without loss scaling."""
        return self._assembled().scaler.scale

    @property
    def skipped(self) -> int:
        """The number of steps skipped because of an overflow."""
        return self._assembled().scaler.skipped

    @property
    def holdings(self) -> LocalState | None:
        """This rank's part of the model; None until the first batch has partitioned a pipeline."""
        return self._parts.holdings if self._parts is not None else None

    def say(self, text: str, kind: Kind = "notice") -> None:
        """Write a line to rank 0's console and to the run's events."""
        self._voice.say(text, kind)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write user-defined numbers (``{"perplexity": p}``) to the console, the files and the report.

        Only the numbers of rank 0 are written; on other ranks the call does nothing.
        """
        self._watch.log(self.steps, values)

    def _tell(self, line: str | None) -> None:
        if line is not None:
            self.say(line)

    def announce(self) -> None:
        """Log the plan and everything about it that the user may not expect."""
        notices = *self._notices, *self._watch.notices, *(self.served.describe() if self.served else ())
        held = self._parts.shards.shards if self._parts and self._parts.shards else {}  # shards replace parameters
        lines = announcement(
            self.world,
            self.plan,
            notices=notices,
            model=self.model,
            held=held,
            optimizers=self._given,
            statistics=self._one.has_local_statistics(),
            separate=self.served.describe_processes() if self.served else None,
        )
        self._voice.announce(lines)
