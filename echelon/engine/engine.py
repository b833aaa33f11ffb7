"""``Engine``: trains one model. It connects the parts; each part is in a module of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from echelon.base.errors import LossError, UsageError
from echelon.base.mesh import AXES
from echelon.data import Loader
from echelon.data.torch_loader import LoaderRequest
from echelon.distributed.activity import activity
from echelon.engine.best_checkpoint import BestCheckpoint
from echelon.engine.checkpoint_calls import CheckpointCalls
from echelon.engine.checkpointing import CheckpointManager
from echelon.engine.collective_calls import collective_call
from echelon.engine.custom_loop import OwnLoop
from echelon.engine.early_calls import NOTHING_EARLY, EarlyCalls
from echelon.engine.ema import MovingAverage
from echelon.engine.forward_backward import ForwardBackward, PreparedBatch, StepLoss
from echelon.engine.in_memory.checkpointer import MemoryCheckpointer
from echelon.engine.leftover_batches import run_leftover
from echelon.engine.loaders import training_request
from echelon.engine.local_gradients import LocalGradients
from echelon.engine.nonfinite import NonfiniteSteps
from echelon.engine.parallelize import parallelize
from echelon.engine.planned_run import PlannedRun
from echelon.engine.replica_buffers import replica_buffers
from echelon.engine.replica_sync import ReplicaSync
from echelon.engine.resume import StateRestorer
from echelon.engine.run_context import RunContext
from echelon.engine.run_view import RunView
from echelon.engine.startup_log import announcement, placement
from echelon.engine.update import OptimizerUpdate, UpdateRecord
from echelon.fastpath.fast_path import fast_path, prepare
from echelon.observability.engine_view import EngineView
from echelon.parallel.data.batch_norm import stand_in_batch
from echelon.parallel.evaluate import EvalOutput, Metric, evaluate
from echelon.parallel.lr_scaling import rate_factor
from echelon.parallel.objective import as_batch, count_samples


class Engine(OwnLoop, CheckpointCalls):
    """Trains one model; created by ``echelon.distribute``. ``step(*batch)`` is a whole training step for any plan.

    >>> engine = echelon.distribute(model, optimizer, loss=loss)
    >>> for x, y in engine.loader(dataset, global_batch=64):
    ...     engine.step(x, y)
    """

    def __init__(self, planned: PlannedRun, batch: Any = None, early: EarlyCalls = NOTHING_EARLY) -> None:
        """Parallelize the model and restore the state that waited for it. All ranks call it together.

        batch: sample batch; a pipeline is partitioned by tracing its forward pass
        early: what the script asked for before the engine was created
        """
        run, grid = planned.run, planned.grid
        self._run, self._planned = run, planned
        prepare(run.model, planned.plan.fast)
        self._parts = parts = parallelize(planned, batch)
        kept = run.kept_directory
        self._fast = fast_path(parts.plan, run.model, planned.objective, run.optimizers, self._forward, run.say, kept)
        buffers = replica_buffers(run, parts.plan, grid)
        self._clock = run.metrics.clock
        self._passes = ForwardBackward(planned, parts, self._fast, buffers, self._forward)
        run.metrics.join(planned.world, planned.loss_ranks(parts), can_have_tokens=not run.backend.pushes)
        self._updates = OptimizerUpdate(run, parts)
        self._local_gradients = LocalGradients(parts, self._passes, self._reduce_early, run.say)
        self._replicas = ReplicaSync(run, grid, parts, buffers)
        self._ema = MovingAverage(run, parts, self._replicas, self._answer_roll, early.ema)
        self._checkpoints = CheckpointManager(run, planned.world, planned.stream, parts, self._ema)
        self._best = BestCheckpoint(planned.world, run.checkpoints.directory)
        self._memories = self._memory_checkpointer()
        self._restorer = StateRestorer(run, self._checkpoints, parts, self._ema, early.state)
        self._nonfinite = NonfiniteSteps(planned, parts, self._restorer)
        self._own_view = RunView(planned, parts, self._passes)
        self._output: Any = None
        run.positions.note_settings(parts.optimizers, run.schedules.all)
        if parts.plan.low_memory is not None:
            from echelon.parallel.low_memory.adam import connect_optimizers

            notices = connect_optimizers(
                parts.optimizers, lambda: self._rate_factor(self.steps + 1), lambda: self._memories
            )
            planned.notices.extend(notices)
        activity.share_part(grid.ranks(*(axis for axis in AXES if axis != "stage")))
        self._open()

    def _open(self) -> None:
        """Log what the model has become, join the servers' job, and restore state that waited for the model."""
        run, parts = self._run, self._parts
        for line in parts.remarks:
            run.say(line, "warning")
        if run.log.placement:
            for line in placement(parts.plan, self._planned.marks, run.world.ranks_per_host, parts.cut):
                run.metrics.say(line)
        first = next(iter(parts.optimizers.values()))
        run.backend.open(
            first, parts.local_state.parameters, lambda: self._checkpoints.pack_worker_state(self.steps + 1)
        )
        run.exit.add(self._finish)
        run.progress.resume_at(self._restorer.finish(self.steps))
        self._nonfinite.keep()
        run.record.assembled(self._view)

    def _memory_checkpointer(self) -> MemoryCheckpointer | None:
        run = self._run
        if run.snapshots is None:
            return None
        statistics = self._replicas.has_local_statistics
        return MemoryCheckpointer(run.snapshots, run.world, self._checkpoints, run.checker, statistics, run.say)

    def _start_timeline(self) -> None:
        if self._run.timeline is not None:
            self._run.timeline.begin(self._view)

    # ---- training ----

    @collective_call("data")
    def step(self, *batch: Any, samples: float | None = None, outputs: bool = False, **named: Any) -> Tensor:
        """Run forward, backward, reduction, clipping and update; return the mean loss over the global batch.

        batch:   inputs and targets of this rank, as positional arguments
        samples: weight of this rank in the mean: the count that its loss averages over (rows, or targets that are not
                 ignored); default: found from the loss
        outputs: True keeps the output of the model for this rank's batch in ``engine.output``
        named:   inputs by name, as the fields of a data set of dictionaries

        If ranks step alone (localsgd; parameter servers in async, bounded and geo mode), the result is the mean loss
        over this rank's batch. With ``gradient_merge``, the call that updates returns the mean over all accumulated
        batches.

        >>> loss = engine.step(x, y)
        """
        run = self._run
        self._clock.lap("data")
        if run.trial is not None:
            run.trial.run(self, itertools.repeat((batch, named)))
        with run.checker.explained():
            prepared = self._prepare(batch, named, samples, outputs)
            # rows of sparse tables are fetched before the forward pass and kept until the update
            with run.backend.step(prepared.inputs):
                loss = self._forward_backward(prepared)
                is_complete = self._reduce(loss, prepared)
            if outputs:
                self._take_outputs(prepared.inputs)
            if not is_complete:  # a later pass completes the update
                return loss.loss
            if self._nonfinite.go_back(self.steps + 1, loss):
                return loss.loss
            update = self._update(self._parts.optimizers, loss)
        return self._observe(update)

    def __call__(self, *batch: Any, **named: Any) -> NoReturn:
        """Raise ``UsageError``: other frameworks' engines are called like the model, this one is not."""
        raise UsageError("the engine is not the model; call engine.step(*batch) to train, or engine.model(...)")

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

        >>> results = engine.evaluate(dataset, metrics=["accuracy"])
        """
        loaders = self._planned.loaders
        loaders.taken()  # discards the sample count of an earlier batch
        batches = loaders.evaluation(data, batch_size, collate)
        averaged = self._ema.applied() if ema else contextlib.nullcontext()
        with self._clock.apart("evaluate"), averaged, self._replicas.shown():
            results = evaluate(self.model, self._evaluate_batch, batches, metrics, self._run.world, loaders.taken)
        prefix = "eval_ema_" if ema else "eval_"
        self._run.metrics.note({"step": self.steps, **{f"{prefix}{name}": value for name, value in results.items()}})
        return results

    @collective_call("communicate")
    def synchronize(self) -> None:
        """Synchronize the model over replicas.

        Replicas that step alone (localsgd) are averaged. If servers hold the parameters, those are fetched. In all
        other cases replicas are equal already.
        """
        self._replicas.sync()

    def loader(
        self, dataset: Any, *sizes: Any, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """Return a loader of this rank's share of ``dataset``, or of a torch DataLoader's dataset.

        dataset:      data set, tuple of tensors, iterable of samples, or torch DataLoader
        sizes:        batch size as a positional argument
        batch_size:   samples per replica; with a plan from ``auto`` or from a file, samples per rank, even if several
                      ranks make up a replica
        global_batch: samples of all replicas together, in place of ``batch_size``
        options:      options of the loader: ``shuffle``, ``uneven``, ``workers``, ... (``echelon.data.LoaderOptions``)

        >>> loader = engine.loader(dataset, global_batch=64, workers=2)
        """
        loader = self._open_loader(training_request(self._run, dataset, sizes, batch_size, global_batch, options))
        if self._run.trial is not None:
            self._run.trial.run(self, (((batch,), {}) for _ in itertools.count() for batch in loader))
        return loader

    def _open_loader(self, request: LoaderRequest) -> Loader:
        return self._planned.loaders.training(request)

    # ---- ending ----

    def close(self) -> None:
        """Finish background work and close connections; the engine cannot train afterwards. All ranks call it.

        Background work is also finished when the process exits.
        """
        self._run.exit.now()
        self._planned.caches.restore()
        self._local_gradients.close()
        self._checkpoints.close()
        self._run.close()

    def _leave(self) -> NoReturn:
        """Save and exit, on all ranks after the same step. A worker of parameter servers exits alone."""
        if self._memories is not None:
            self._memories.after(self.steps, at_once=True)
        directory = self._run.checkpoints.directory
        if directory is not None:
            self.save(wait=True)
        self._run.preemption.leave(self.steps, directory, self._run.say)

    def _finish(self, error: BaseException | None) -> None:
        """Finish background work.

        error: exception that ends the process; None without one
        """
        if error is None:
            merged, waits = self._parts.gradients.merged, self._passes.is_waiting
            if (line := run_leftover(merged, self.plan.gradient_merge, waits)) is not None:
                self._run.say(line)
        self._run.backend.leave(error is None, self._run.say)
        if self._run.timeline is not None:
            self._run.timeline.close(self._view)
        self._checkpoints.wait()
        if self._memories is not None:
            self._memories.close()
        if error is None:
            self._run.record.measured(self._view)

    # ---- inside a step ----

    def _prepare(
        self, batch: tuple[Any, ...], named: dict[str, Any], samples: float | None, outputs: bool
    ) -> PreparedBatch:
        """Move the batch to the device, count its rows and compare it with other ranks' batches in the first steps."""
        inputs = as_batch(batch, named, self._run.world.device)
        if self._fast is not None:
            inputs = self._fast.arrange(inputs)
        self._nonfinite.check_loop(has_own_loop=False)
        loaders = self._planned.loaders
        rows = loaders.rows(inputs, samples)
        self._planned.batches.compare(inputs)
        self._ask_outputs(outputs)
        self._run.schedules.before_pass(loaders.epoch)
        return PreparedBatch(inputs, rows, samples)

    def _forward_backward(self, batch: PreparedBatch) -> StepLoss:
        """Run forward and backward, in which buckets of gradients are reduced as they fill up."""
        try:
            with stand_in_batch(batch.rows == 0):
                return self._passes.run(batch, self._run.progress.steps)
        except LossError as error:
            raise LossError(f"{self._run.checker.here()}: {error}") from None

    def _reduce(self, loss: StepLoss, batch: PreparedBatch) -> bool:
        """Complete the reduction of the gradients, and check the loss; return False if later passes are merged in."""
        return self._passes.reduce(loss, batch, self._run.progress.steps)

    def _update(self, optimizers: Mapping[str, torch.optim.Optimizer], step_loss: StepLoss) -> UpdateRecord:
        """Apply the reduced gradients: clip, step the optimizers or push to servers, step the schedulers."""
        run, updates, averages = self._run, self._updates, self._ema.averages
        samples, loss = self._examples(), self._passes.update_loss(step_loss)
        if averages is not None:
            self._ema.refuse("engine.step()")
        step = run.progress.steps + 1
        rate, factor = updates.begin(optimizers), self._rate_factor(step)
        norm, is_skipped = None, self._nonfinite.skip(step, step_loss)
        if not updates.empty:
            norm = self._update_weights(optimizers, loss, factor)
        else:
            run.backend.skip()
        for news in updates.end(step, step_loss.local, rate):
            run.say(f"step {step}: {news}")
        run.progress.advance()
        if averages is not None and not is_skipped:
            self._ema.update(optimizers)
        self._nonfinite.keep()
        if run.backend.steps_together:
            loss = run.backend.finish_step(loss)
            self._clock.lap("communicate")
        self._clock.lap("update")
        return UpdateRecord(loss, samples, rate * factor, norm)

    def _observe(self, update: UpdateRecord) -> Tensor:
        """Record the update in timeline and metrics, take due checkpoints and snapshots, and return its loss."""
        run, step, total = self._run, self._run.progress.steps, self._run.progress.total
        total = self._planned.loaders.total_steps if total is None else total
        if run.timeline is not None and not run.timeline.over:
            with run.checker.explained(), self._clock.apart("timeline"):
                run.timeline.after(self._view, total)
        run.metrics.step(step, update.loss, update.samples, update.rate, total, update.norm)
        if run.preemption.due(step, self._replicas.next_sync):
            self._leave()
        if run.checkpoints.due(step):
            self.save()
        if self._memories is not None:
            self._memories.after(step)
        return update.loss

    @property
    def _forward(self) -> Callable[[Any], Tensor]:
        """The function from a batch to its loss."""
        return self._planned.objective.forward_loss

    def _evaluate_batch(self, batch: Any) -> list[EvalOutput]:
        with self._run.checker.explained():
            return self._passes.evaluate(batch)

    def _ask_outputs(self, requested: bool) -> None:
        """Start collecting outputs, or drop those of an earlier step."""
        self._output = None
        objective = self._planned.objective
        if requested is not False:
            from echelon.parallel.step_outputs import requested_outputs

            objective.collect_outputs(requested_outputs(requested))
        elif objective.outputs is not None:  # of a step that has failed
            objective.collect_outputs(None)

    def _take_outputs(self, inputs: Any) -> None:
        gathered = self._planned.objective.outputs
        assert gathered is not None
        self._planned.objective.collect_outputs(None)
        at_once = self._parts.staged is None
        self._output = gathered.latest() if at_once else gathered.together(count_samples(inputs))

    def _examples(self) -> Tensor | float | None:
        """Return the samples of all ranks in all accumulated passes; None if their number is unknown.

        Ranks that step alone are assumed to have equal numbers of samples.
        """
        if not self._passes.counted:
            return None
        rows = self._parts.gradients.merged_rows
        return rows * self._planned.world.data_size if self._parts.group is None else rows

    def _update_weights(
        self, optimizers: Mapping[str, torch.optim.Optimizer], loss: Tensor, factor: float
    ) -> Tensor | None:
        if self._memories is not None:
            self._memories.hold()
        return self._updates.weights(optimizers, factor, loss)

    def _rate_factor(self, step: int) -> float:
        elastic = self._run.elastic
        begun_with = elastic.first_replicas if elastic.rule else None
        return rate_factor(self._parts.plan, step, begun_with) * elastic.factor


def begin(planned: PlannedRun, batch: Any = None, early: EarlyCalls = NOTHING_EARLY) -> Engine | None:
    """Create the engine if the model can be parallelized now, and log the start of the run; all ranks call it.

    The result is None for a pipeline without a batch.
    """
    run = planned.run
    engine = run.make_engine(planned, batch, early) if planned.is_complete(batch) else None
    parts = None if engine is None else engine._parts
    planned.seed()
    run.voice.announce(announcement(planned, parts))
    run.record.begun(RunView(planned, parts))
    if engine is not None:
        engine._start_timeline()
    return engine


def context_of(engine: Engine) -> RunContext:
    """Return the run of an engine, for packages that add to its log and to run.json."""
    return engine._run


def view_of(engine: Engine) -> EngineView:
    """Return the state of an engine that traces read."""
    return engine._view
