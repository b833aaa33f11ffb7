"""Engine: trains one model. It only strings the parts together; each part has its own room."""

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
from echelon.engine.elastic import Elastic, ElasticState
from echelon.engine.ema import MovingAverage
from echelon.engine.forward_backward import ForwardBackward, refuse_own_loop
from echelon.engine.in_memory.checkpointer import MemoryCheckpointer
from echelon.engine.leftover_batches import epoch_leftover, run_leftover
from echelon.engine.loaders import LoaderFactory
from echelon.engine.local_gradients import LocalGradients
from echelon.engine.lr_schedules import AnyScheduler, LRSchedulers
from echelon.engine.own_loop import OwnLoop
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
    """Made by ``echelon.distribute``. ``step(*batch)`` is the whole of a training step, whatever the plan."""

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
        self.served = served  #: parameter servers' part, where tables or parameters live there
        self.worker = served.worker if served and served.dense else world.rank  #: which of those that train this is
        self.trial = trial  #: in a process that only times a candidate of ``auto``
        self._schedules = LRSchedulers(schedulers, optimizers.values(), self.say)
        #: of the model in the last ``step(..., outputs=True)``; None on a pipeline's other stages
        self.output: Any = None
        self.steps = 0  #: updates so far, those that an overflow skipped included
        self.total_steps: int | None = None  #: for the console, where the loop ends before its epochs do
        self.optimizers = dict(optimizers)  #: what takes the steps
        self._company = ConsistencyChecker(
            world, groups, lambda: self.steps + 1, lambda line: self.say(line, "warning")
        )
        self.answer_roll = self._company.answer_roll  #: before each call that all ranks make together
        self._one = ReplicaSync(model, self._company, served)
        self._given, self._judged_by = optimizers, loss  # what the user made, and schedules drive
        self._guard = StepGuard(optimizers.values(), alone=world.size == 1 and served is None, say=self.say)
        self._choosing = choosing  # with ``auto``, until the plan is found
        self._parts: ParallelModel | None = None  # until ``parallelize``
        self._fast: FastPath | None = None
        self._caches: CacheSwitch | None = None  # until ``begin``
        self._local: LocalSgdAverager | None = None
        self._loader: Loader | None = None
        self._leaving: PreemptionHandler | None = None
        self._log, self._watch = log, MetricsLogger(log, world.device, self.worker)
        self._clock = self._watch.clock
        self._timeline: TraceSession | None = requested_session(log, self._watch.directory)
        self.record = RunLogWriter(self._watch.directory, self.worker)  #: what the run writes down of itself
        self._voice = RunLogger(self._watch, self.record, speaks=self.worker == 0)
        self._beginning = ElasticState(elastic, world.size)
        self._take(plan, marks)
        self._keeper = CheckpointManager(world, self.stream, self._schedules, checkpoint)
        self._keeper.beginning = self._beginning
        self._keeper.saved = self._voice.saved
        self._keeper.claims.say, self._keeper.claims.writes = self.say, self.worker == 0
        rooms = self._keeper, self._company, self._one.has_local_statistics, self.say
        traceless = trial is not None or served is not None  # servers keep a journal of their own
        self._memories = None if traceless else MemoryCheckpointer.find(world, *rooms)
        self._resuming = StateRestorer(world, self._keeper, served, self._memories, self._voice)
        #: a moving average of the weights: ``engine.ema(decay=0.999)`` begins it
        self.ema = MovingAverage(world, self._company, self._one, self._keeper, served, lambda: self.steps, self.say)
        self._ending = ExitHook(self._finish)

    def _take(self, plan: Plan, marks: ModelMarks, found: SavedPlan | None = None) -> None:
        self.plan, self._marks = plan, marks
        self.found = found  #: the plan as it was found (``auto``, a saved plan); None where marks and strategy said all
        self._grid = MeshGroups(plan.mesh, plan.order, self.world.rank, self._company.groups)
        self.place = self._grid.at  #: this rank's index along every axis of the mesh
        #: which of the random streams this rank has; ranks that share a batch compute the same, dropout included
        self.stream = self.worker if plan.spread or self.world.size == 1 else self._grid.ranks("split")[0]
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
        """Go by this plan, on all ranks together: at once, or with ``auto`` when it has been ``found``."""
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
        """Give this rank its part of the model. A pipeline needs a batch for it: it is cut by recording a forward."""
        prepare(self.model, self.plan.fast)
        what = self.model, self._objective, self._given, self.plan, self._marks, batch
        parts = parallelize(self.world, self._company, self._grid, *what)
        self._parts, self.plan, self.optimizers = parts, parts.plan, parts.optimizers
        self._gradients, self._local = parts.gradients, parts.local
        if self.plan.lean is not None:
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
            self._ending.comes_first()  # while the links are open
        self.steps = self._resuming.takes(parts, self.steps)
        self.record.assembled(self)

    def _furnish(self, parts: ParallelModel) -> None:
        """Give the rooms what they work with."""
        plan, grid = parts.plan, self._grid
        group = grid.group(*plan.data_axes, *(["stage"] if plan.stages else []))  # who knows of one global loss
        group = None if parts.local else group  # who shares every step
        parts.gradients.meet(group)
        self._fast = fast_path(plan, self.model, self._objective, self._given, self.say)
        work = parts, self._objective, self._fast, group
        self._rows.open()
        self._passes = ForwardBackward(
            self.world, grid, *work, self._clock, self._rows, self.say, self.served is not None
        )
        self._updates = OptimizerUpdate(
            self.world, self._given, self._schedules, self.served, parts, self._company, self._guard
        )
        self._local_gradients = LocalGradients(parts, self._passes, self._reduce_early, self.say)
        self._company.takes(plan, grid, parts.local)
        self._one.local = parts.local
        kept = self.model, plan, grid, self.world.control, self._company, lambda line: self.say(line, "warning")
        self._passes.buffers = self._one.buffers = replica_buffers(*kept)
        self._keeper.takes(parts)
        self.ema.takes(parts)
        activity.alike = grid.ranks(*(axis for axis in AXES if axis != "stage"))

    # ---- training ----

    @collective_call("data")
    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        """Forward, backward, reduce, clip, update. Returns the mean loss over the global batch.

        Where ranks step alone (localsgd; parameter servers in async, bounded and geo mode) it is the mean loss over
        this rank's own batch. With ``gradient_merge`` the call that updates returns the mean over all batches of it.

        Each rank counts in that mean for what its loss averages over: rows, or targets that are not ignored, as the
        loss itself tells. ``samples`` says it where it cannot be seen.

        With ``outputs=True``, ``engine.output`` is what the model has returned for this rank's batch.
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
            # rows of sparse tables are there before the forward pass, and stay until the update
            with stand_in_batch(rows == 0), self.served.step(inputs) if self.served else contextlib.nullcontext():
                tally = self._pass(inputs, rows, samples)
            if outputs:
                self._take_outputs(inputs)
        return self._apply(self.optimizers, tally) if self._gradients.ready else tally.loss

    def backward(self, loss: Tensor, samples: float | None = None) -> None:
        """For a loop of your own: add this loss's gradients. They stay local until ``update`` or ``reduce``.

        ``samples`` is what ``update`` takes, told before: batch norm over replicas needs it where batches differ.
        """
        self._need_plan()
        refuse_own_loop(self.plan, self.served is not None)
        self._schedules.before_pass(self._epoch)
        self._passes.add(loss, samples)
        self._local_gradients.added()

    def __call__(self, *batch: Any, **named: Any) -> NoReturn:
        """Refuse: other frameworks' engines are called in the model's place."""
        raise UsageError("the engine is not the model; call engine.step(*batch) to train, or engine.model(...)")

    @property
    def has_own_loop(self) -> bool:
        """Whether ``backward`` has been called."""
        return self._passes.has_own_loop

    @collective_call("communicate")
    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        """For a loop of your own: reduce, clip, step the named optimizer (or all), and drop every gradient.

        Each rank counts in the mean for what its loss averages over. ``samples`` says it where that cannot be seen,
        here or in ``backward``; ranks that neither say nor show it count alike.
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
        """Mean loss and metrics over ``data``, every sample counted once; ``ema``: of the averaged weights.

        ``data`` is a data set or a tuple of tensors, shared out in batches of ``batch_size`` (64) a replica, which
        ``collate`` makes of samples; a torch DataLoader, of which data set, batch size and collate are taken; or an
        iterable of batches that are this rank's own.
        """
        self._need_plan()
        self._feeding.taken()  # what is left of the batch before is no part of this
        batches = self._feeding.judged(data, batch_size, collate, self.say)
        with self.ema.applied() if ema else contextlib.nullcontext(), self._one.shown():
            results = evaluate(self.model, self._judge, batches, metrics, self.world, self._feeding.taken)
        prefix = "eval_ema_" if ema else "eval_"
        self._watch.note({"step": self.steps, **{f"{prefix}{name}": value for name, value in results.items()}})
        return results

    @collective_call("communicate")
    def synchronize(self) -> None:
        """Make the model what it is for all: where replicas step alone (localsgd) their average; where servers hold the
        parameters, theirs. Else replicas are equal already."""
        self._one.meet()

    def loader(
        self, dataset: Any, *sizes: Any, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """This rank's share of ``dataset``, or of a torch DataLoader's. See echelon.data.Loader for the options.

        ``batch_size`` is for each replica; ``global_batch``, in its place, for all of them together. Where the plan was
        found (``auto``, a saved plan), ``batch_size`` is for each rank, however many of them make up a replica.
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
        """Give schedulers after ``distribute``, where they have to know the loader's length, and before training."""
        self._schedules.attach_late(given)

    def _epoch(self) -> int | None:
        return None if self._loader is None else self._loader.epoch

    # ---- keeping ----

    @collective_call("save")
    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        """Write a checkpoint of the whole training state; all ranks call it together. Returns its path."""
        self._assembled()
        self._passes.losses.look()
        self.ema.before_save()
        own = self._keeper.own_state()
        with self._one.shown():
            return self._keeper.save(directory, self.steps, own, wait, self.served)

    @collective_call("communicate")
    def whole_state(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model by name, whole, in host memory, on every rank. All ranks call it.

        Under a split, a pipeline or ``shard`` a rank's own ``model`` holds parts only.
        """
        parts = self._assembled()
        with self._company.explained(), self._one.shown():
            return whole_state(parts.holdings, self.world.control, self.plan.in_parts or self.plan.shard is not None)

    @collective_call("load")
    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, or from the newest one in a directory, saved by any number of processes."""
        self.ema.refuse("engine.load()")
        self.steps = self._resuming.load(path)

    def resume(self) -> None:
        """Go on from the newest checkpoint of ``distribute(checkpoint=...)``, or from copies in memory that are as new,
        when there are any."""
        self.steps = self._resuming.newest(self.steps)

    # ---- ending ----

    def close(self) -> None:
        """Finish what runs in the background and let go of connections; the engine trains no more. All ranks call it.

        At exit it happens by itself.
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
        """From now on, SIGTERM and SIGUSR1 to any rank let all of them save and leave after the same step."""
        self._leaving = PreemptionHandler(self.world, self.worker)

    def _leave(self, leaving: PreemptionHandler) -> NoReturn:
        """Save and end this process, on all ranks after the same step. A worker of servers leaves by itself."""
        if self._memories is not None:
            self._memories.after(self.steps, at_once=True)
        if self._keeper.kept_in is not None:
            self.save(wait=True)
        leaving.leave(self.steps, self._keeper.kept_in, self.say)

    def _finish(self, error: BaseException | None) -> None:
        """What runs in the background comes to its end; ``error`` is what the process ends with."""
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
        """Begin to gather outputs, or let go of those of an earlier step."""
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
        """Use gradients that are ready. Returns the loss of the update."""
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
        """Samples of all ranks, in all passes that were merged; None where nobody has said how many. Ranks that step
        alone are taken to be alike."""
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

    # ---- what it says ----

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 without a loss scale."""
        return self._assembled().scaler.scale

    @property
    def skipped(self) -> int:
        """Steps that an overflow has skipped so far."""
        return self._assembled().scaler.skipped

    @property
    def holdings(self) -> LocalState | None:
        """What of the model this rank has; None until a pipeline's first batch has cut it."""
        return self._parts.holdings if self._parts is not None else None

    def say(self, text: str, kind: Kind = "notice") -> None:
        """A line on rank 0's console, and among the run's events."""
        self._voice.say(text, kind)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write numbers of your own (``{"perplexity": p}``) to the console, the files and the report.

        Rank 0's count; on other ranks it does nothing.
        """
        self._watch.log(self.steps, values)

    def _tell(self, line: str | None) -> None:
        if line is not None:
            self.say(line)

    def announce(self) -> None:
        """Say what will run, and what the user may not expect."""
        notices = *self._notices, *self._watch.notices, *(self.served.describe() if self.served else ())
        held = self._parts.shards.shards if self._parts and self._parts.shards else {}  # in place of parameters
        differ = self._one.has_local_statistics()
        separate = self.served.describe_processes() if self.served else None
        what = notices, self.model, held, self._given, differ, separate
        self._voice.announce(announcement(self.world, self.plan, *what))
