"""Engine: trains one model. It only strings the parts together; each part has its own room."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from echelon.annotation import Marks
from echelon.announcement import announcement, left_out, local_statistics, placement
from echelon.assembly import Parts, assemble
from echelon.data import Loader
from echelon.elastic import Beginning, Elastic
from echelon.environment import REQUEUE
from echelon.errors import CheckpointError, Damaged, EchelonError, LossError, UsageError, nearest
from echelon.evaluate import Judged, Metric, evaluate
from echelon.fast.path import FastPath, fast_path, plain_pass, prepare
from echelon.feeding import Feeding, is_data_set
from echelon.keep import Checkpoint, Keeper, Scheduler
from echelon.leave import Leaving
from echelon.memory.where import Where
from echelon.objective import LossFunction, Objective, as_batch, count_samples, scalar
from echelon.parallel.agree import RollCall, agree, agree_on_batch, together
from echelon.parallel.batch_norm import idle
from echelon.parallel.clip import clip_gradients
from echelon.parallel.collective import gather_json
from echelon.parallel.grid import Grid
from echelon.parallel.groups import Groups
from echelon.parallel.holdings import Holdings
from echelon.parallel.peers import peers_explained
from echelon.parallel.precision import check_precision
from echelon.parallel.rates import rate_factor, scaled_rates
from echelon.parallel.replicate import average_buffers, broadcast_state
from echelon.parallel.succession import replaced_decay
from echelon.parallel.tally import StagedTally, Tally
from echelon.parallel.whole import whole_state
from echelon.plan import Plan
from echelon.plan.make import batch_norm_names
from echelon.plan.mesh import AXES
from echelon.record.events import Kind
from echelon.record.recorder import Recorder
from echelon.timeline.recording import Recording, asked_for
from echelon.watch import Log, Watch
from echelon.watch.activity import activity
from echelon.watch.losses import Losses
from echelon.world import World, seed_for_rank

if TYPE_CHECKING:
    from echelon.checkpoint import Stored
    from echelon.memory.copies import Copies
    from echelon.parallel.local import LocalSteps
    from echelon.parallel.pipeline.train import MicroBatches, Staged
    from echelon.planner.run.auto import Choosing
    from echelon.planner.run.saved import SavedPlan
    from echelon.planner.run.trial import Trial
    from echelon.ps.served import Served


class Engine:
    """Made by ``echelon.distribute``. ``step(*batch)`` is the whole of a training step, whatever the plan."""

    def __init__(
        self,
        world: World,
        groups: Groups,
        model: nn.Module,
        loss: LossFunction | None,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Sequence[Scheduler],
        plan: Plan,
        marks: Marks,
        checkpoint: Checkpoint | None,
        log: Log,
        served: Served | None = None,
        choosing: Choosing | None = None,
        elastic: Elastic | None = None,
    ) -> None:
        self.world, self.model = world, model
        self.served = served  #: parameter servers' part, where tables or parameters live there
        self.schedulers = schedulers
        self.steps = 0  #: updates so far, those that an overflow skipped included
        self.total_steps: int | None = None  #: for the console, where the loop ends before its epochs do
        self.optimizers = dict(optimizers)  #: what takes the steps
        self._groups: Groups | None = groups  # None when closed
        self._given, self._judged_by = optimizers, loss  # what the user made, and schedules drive
        self._parts: Parts | None = None  # until ``assemble``
        self._fast: FastPath | None = None
        self._choosing = choosing  # with ``auto``, until the plan is found
        self.trial: Trial | None = None  #: in a process that only times a candidate of ``auto``
        self._beginning = Beginning(elastic, world.size)
        self._take(plan, marks)
        self._keeper = Keeper(world, self.stream, schedulers, checkpoint)
        self._keeper.beginning = self._beginning
        self._pending: Path | Stored | None = None  # a checkpoint to load once the model is assembled
        self._log = log
        self._watch = Watch(log, world.device, self.worker)
        self._clock = self._watch.clock
        self._timeline: Recording | None = asked_for(log, self._watch.directory)
        self.record = Recorder(self._watch.directory, self.worker)  #: what the run writes down of itself
        self._keeper.saved = self._note_saved if self.worker == 0 else None
        self._owned = _parameter_count(optimizers)
        self._local_loss = torch.zeros(())  # sum of what backward() was given since the last update()
        self._loader: Loader | None = None
        self._losses = Losses(world.rank, on_gpu=world.device.type == "cuda")
        self._local: LocalSteps | None = None
        limit = timedelta(seconds=world.timeout)
        self._roll = RollCall(partial(groups.new, None, "gloo", limit) if world.control is not None else None)
        self._leaving: Leaving | None = None
        self._memories = Where.for_next_engine() if served is None else None  # servers keep a journal of their own
        self._copies: Copies | None = None
        atexit.register(self._close_at_exit)

    def _take(self, plan: Plan, marks: Marks, found: SavedPlan | None = None) -> None:
        assert self._groups is not None
        self.plan, self._marks, self._found = plan, marks, found
        self._grid = Grid(plan.mesh, plan.order, self.world.rank, self._groups)
        self._objective = Objective(self.model, self._judged_by, plan.amp, self.world.device)
        self._notices = replaced_decay(plan, self._given)
        self._feeding = Feeding(self.world, plan, self._grid, self._beginning, self.served, by_rank=found is not None)
        self._is_last = self._grid.at["stage"] == self._grid.size("stage") - 1
        # Of all ranks that work on one batch, one speaks for it.
        self._speaks = self._is_last and (plan.spread or self._grid.at["split"] == 0)

    def begin(self, plan: Plan, marks: Marks, batch: Any = None, found: SavedPlan | None = None) -> None:
        """Go by this plan, on all ranks together: at once, or with ``auto`` when it has been ``found``."""
        check_precision(plan.amp, self.world.device)
        if self.world.control is not None:
            agree(plan, self.world.control)
            self._roll.open()
            broadcast_state(self.model)
        self._take(plan, marks, found)
        self._choosing, self._keeper.stream = None, self.stream
        if found is not None and found.predicted is not None:
            held = sum(value.untyped_storage().nbytes() for value in self.model.parameters())
            memory = found.predicted.memory[self._grid.at["stage"]]
            self._watch.foretell(found.predicted.seconds, memory, held)
        if batch is not None or plan.mesh.get("stage", 1) == 1:
            self.assemble(batch)
        seed_for_rank(self.world.seed, self.stream)
        self.announce()
        self.record.begun(self)
        if self._timeline is not None:
            self._timeline.begin(self)

    def assemble(self, batch: Any = None) -> None:
        """Give this rank its part of the model. A pipeline needs a batch for it: it is cut by recording a forward."""
        if self._groups is None:
            raise UsageError("the engine is closed and trains no more; call distribute() for another")
        prepare(self.model, self.plan.fast)
        parts = assemble(
            self.world,
            self._groups,
            self._grid,
            self.model,
            self._objective,
            self._given,
            self.plan,
            self._marks,
            batch,
        )
        self._parts, self.plan, self.optimizers = parts, parts.plan, parts.optimizers
        self._gradients, self._scaler, self._local = parts.gradients, parts.scaler, parts.local
        self._owned = _parameter_count(self._given)
        if self.plan.lean is not None:
            from echelon.lean.adam import attend

            self._notices += attend(self.optimizers, lambda: self._rate_factor(self.steps + 1), lambda: self._copies)
        self._fast = fast_path(self.plan, self.model, self._objective, self._given, self.say)
        axes = (*self.plan.data_axes, *(["stage"] if self.plan.stages else []))
        self._group = self._grid.group(*axes)  # who knows of one global loss
        self._together = None if self._local else self._group  # who shares every step
        self._gradients.meet(self._together)
        self._losses.group = self.world.control if self._together else None
        self._shared_axes = tuple(axis for axis in ("stage", "split") if axis not in self.plan.data_axes)
        self._partners = self._grid.control(*self._shared_axes) if self.plan.in_parts else None
        self._keeper.takes(parts)
        activity.alike = self._grid.ranks(*(axis for axis in AXES if axis != "stage"))
        if self._local:
            self._local.before_meeting = lambda: self._roll.answer("step", self.steps + 1)
        if self._log.placement:
            for line in placement(self.plan, self._marks, self.world.place.local_world_size):
                self._watch.say(line)
        if self.served is not None:
            self.served.open(next(iter(self.optimizers.values())), parts.holdings.parameters)
            self.served.blob = lambda: self._keeper.leave_behind(self.steps + 1)
            atexit.unregister(self._close_at_exit)
            atexit.register(self._close_at_exit)  # after those of the links, so that it still finds them open
        if self._pending is not None:
            self._restore(self._pending)
        self.record.assembled(self)

    # ---- training ----

    @together("data")
    def step(self, *batch: Any, samples: float | None = None, **named: Any) -> Tensor:
        """Forward, backward, reduce, clip, update. Returns the mean loss over the global batch.

        Where ranks step alone (localsgd) it is the mean loss over this rank's own batch.

        ``samples`` is this rank's weight in that mean, by default the length of the batch's first dimension; give it
        where that is not what the loss averages over (tokens, say).
        """
        self._clock.lap("data")
        if self.trial is not None:
            self.trial.run(self, itertools.repeat((batch, named)))
        with self._explained():
            inputs = as_batch(batch, named, self.world.device)
            if self._fast is not None:
                inputs = self._fast.arrange(inputs)
            count = self._feeding.count(inputs, samples)
            parts = self._assembled(inputs)
            self._compare_batches(inputs)
            # rows of sparse tables are there before the forward pass, and stay until the update
            with idle(count == 0), self.served.step(inputs) if self.served else contextlib.nullcontext():
                tally = self._staged_step(inputs, count, parts.staged) if parts.staged else self._step(inputs, count)
            self._note_loss(tally)
        if self._gradients.ready:
            self._apply(self.optimizers, tally)
        return tally.loss

    def backward(self, loss: Tensor) -> None:
        """For a loop of your own: add this loss's gradients. They stay local until ``update``."""
        self._need_plan()
        if self.plan.pipeline is not None:
            raise UsageError("a pipeline runs its own backward, micro-batch by micro-batch; call engine.step()")
        if self.served is not None:
            raise UsageError("sparse tables and parameter servers are trained by engine.step(), not by backward()")
        if self.plan.gradient_merge > 1:
            raise UsageError(
                "gradient_merge belongs to engine.step(); in your own loop call engine.update() less often"
            )
        self._gradients.add_local(scalar(loss))
        self._local_loss = self._local_loss + loss.detach()

    @together("communicate")
    def update(self, optimizer: str | None = None, samples: float | None = None) -> None:
        """For a loop of your own: reduce, clip, step the named optimizer (or all), and drop every gradient.

        Ranks count alike in the mean unless each says how many ``samples`` its gradients stand for.
        """
        self._need_plan()
        chosen, weight = self._chosen(optimizer), 1.0 if samples is None else samples
        self._clock.lap("backward")
        with self._explained():
            tally = Tally(self._local_loss.to(self.world.device), weight, self.plan.reduce_op, self._together)
            self._gradients.reduce(chosen, weight, tally, self.steps)
            self._note_loss(tally)
        self._local_loss = torch.zeros(())
        self._clock.lap("communicate")
        self._apply(chosen, tally)

    @together("evaluate")
    def evaluate(
        self, data: Any, *, batch_size: int | None = None, metrics: Mapping[str, Metric | str] | Sequence[str] = ()
    ) -> dict[str, float]:
        """Mean loss and metrics over ``data``, every sample counted once.

        ``data`` is a data set or a tuple of tensors, shared out in batches of ``batch_size`` (64) a replica, or an
        iterable of batches that are this rank's own.
        """
        self._need_plan()
        self._feeding.taken()  # what is left of the batch before is no part of this
        batches = data
        if batch_size is not None or is_data_set(data):
            batches = self._feeding.judged(data, batch_size or 64)
        with self._as_one_model():
            results = evaluate(self.model, self._judge, batches, metrics, self.world, self._feeding.taken)
        self._watch.note({"step": self.steps, **{f"eval_{name}": value for name, value in results.items()}})
        return results

    @together("communicate")
    def synchronize(self) -> None:
        """Make the model what it is for all: where replicas step alone (localsgd) their average; where servers hold the
        parameters, theirs. Else replicas are equal already."""
        if self.served is not None:
            with self._explained():
                self.served.refresh()
        if self._local:
            with self._explained():
                self._local.meet()

    def loader(
        self, dataset: Any, *, batch_size: int | None = None, global_batch: int | None = None, **options: Any
    ) -> Loader:
        """This rank's share of ``dataset``. See echelon.data.Loader for the options.

        ``batch_size`` is for each replica; ``global_batch``, in its place, for all of them together. Where the plan was
        found (``auto``, a saved plan), ``batch_size`` is for each rank, however many of them make up a replica.
        """
        batch_size, global_batch = self._beginning.sizes(batch_size, global_batch)
        if self._choosing is not None:
            self._choosing.by_data(self, dataset, batch_size, global_batch, options)
        ahead = self.served.ahead if self.served else None
        loader = self._feeding.training(dataset, batch_size, global_batch, self.say, ahead, options)
        self._keeper.register(loader)
        self._loader = self._loader or loader
        if self._found is not None and self._found.draft.batch != loader.global_batch:
            self.say(f"the plan was made for a global batch of {self._found.draft.batch}; another may be quicker here")
        if self.trial is not None:
            self.trial.run(self, (((batch,), {}) for _ in itertools.count() for batch in loader))
        return loader

    # ---- keeping ----

    @together("save")
    def save(self, directory: str | Path | None = None, *, wait: bool | None = None) -> Path:
        """Write a checkpoint of the whole training state; all ranks call it together. Returns its path."""
        self._losses.look()
        self._assembled()
        own = self._keeper.own_state()
        with self._as_one_model():
            return self._keeper.save(directory, self.steps, own, wait, self.served)

    @together("communicate")
    def whole_state(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model by name, whole, in host memory, on every rank. All ranks call it.

        Under a split, a pipeline or ``shard`` a rank's own ``model`` holds parts only.
        """
        parts = self._assembled()
        with self._explained(), self._as_one_model():
            in_parts = self.plan.in_parts or self.plan.shard is not None
            return whole_state(parts.holdings, self.world.control, in_parts)

    @together("load")
    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, or from the newest one in a directory, saved by any number of processes."""
        self._go_on_from(path)

    def _go_on_from(self, source: str | Path | Stored) -> None:
        if self._parts is None:  # a pipeline that no batch has cut yet; where loaders go on is known already
            found = self._keeper.peek(source)
            self._pending, self.steps = found, found.step
        else:
            self._restore(source)

    def _restore(self, source: str | Path | Stored) -> None:
        assert self._parts is not None
        stored = self._keeper.load(source, loaders=self._pending is None, served=self.served)
        self._pending = None
        if self._parts.shards is not None:
            self._parts.shards.refresh()
        self.steps = stored.step
        self.say(f"resumed from {stored.title}, after step {stored.step}{stored.origin}", "resumed")
        self.record.resumed()
        if stored.world_size != self.world.size:
            self.say(f"saved by {stored.world_size} ranks, resumed by {self.world.size}: random streams start afresh")

    def resume(self) -> None:
        """Go on from the newest checkpoint of ``distribute(checkpoint=...)``, or from copies in memory that are as new,
        when there are any."""
        if self.served is not None and (left := self.served.resumed) is not None:
            self.steps = self._keeper.take_up(left)
            self.say(f"went on after step {self.steps}, where this worker was before it was started again", "resumed")
            self.record.resumed()
            return
        if (copies := self._remembered()) is not None:
            self._go_on_from(copies)
        else:
            self._go_on_from_first_whole(self._keeper.kept())

    def _go_on_from_first_whole(self, checkpoints: Sequence[Path]) -> None:
        """Ranks read different parts of a checkpoint: what one of them finds damaged, none goes on from."""
        found: list[str | None] = []
        for path in checkpoints:
            damage = self._damage_met(path)
            found = [damage] if self.world.control is None else gather_json(damage, self.world.control)
            if not any(found):
                return
            self.say(f"{next(filter(None, found))}; looking at the one before it")
        if any(found):
            raise CheckpointError(f"none of {len(checkpoints)} checkpoints is whole: {next(filter(None, found))}")

    def _damage_met(self, path: Path) -> str | None:
        """Go on from there; or why that cannot be, and nothing here is to be trusted."""
        try:
            if self._parts is None and self.world.rank == 0:  # too late to choose another when it is read
                self._keeper.verify(path)
            self._go_on_from(path)
        except Damaged as error:
            return str(error)
        return None

    def _remembered(self) -> Stored | None:
        """The newest copies that the hosts' memories hold, of no earlier step than the checkpoint."""
        if self._memories is None or self._memories.round == 0 or self.trial is not None:
            return None
        from echelon.memory.remembered import newest

        with self._explained():
            return newest(self._memories, self._keeper.newest_step(), self.world.control, self.world.rank)

    def close(self) -> None:
        """Finish what runs in the background and let go of connections; the engine trains no more. All ranks call it.

        At exit it happens by itself.
        """
        atexit.unregister(self._close_at_exit)
        self._leave_servers(done=True)
        self._finish_background()
        self.record.closed(self)
        if self._groups is not None:
            self._groups.close()
            self._keeper.close()
        self._groups = None

    def heed_signals(self) -> None:
        """From now on, SIGTERM and SIGUSR1 to any rank let all of them save and leave after the same step."""
        self._leaving = Leaving(self.world, self.worker)

    def _next_meeting(self) -> int:
        """The next step that no rank can finish without all others."""
        return self._local.next_meeting(self.steps) if self._local else self.steps + 1

    def _leave(self, reason: str) -> NoReturn:
        """Save and end this process, on all ranks after the same step. A worker of servers leaves by itself."""
        kept = f"step {self.steps} is in the launchers' memory"
        if self._keeper.kept_in is not None:
            self.save(wait=True)
            kept = f"saved step {self.steps} in {self._keeper.kept_in}"
        self.say(f"asked to end by {reason}: {kept}; exit code {REQUEUE} asks to be started again")
        raise SystemExit(REQUEUE)

    def _finish_background(self) -> None:
        if self._timeline is not None:
            self._timeline.close(self)
        self._watch.close()
        self._keeper.wait()
        if self._copies is not None:
            self._copies.close()
        if self._leaving is not None:
            self._leaving.close()

    def _leave_servers(self, done: bool) -> None:
        if self.served is None:
            return
        if done and self.worker == 0 and (line := self.served.summary()) is not None:
            self.say(line)
        self.served.close(done)

    def _close_at_exit(self) -> None:
        try:
            self._leave_servers(done=not _failing())
            self._finish_background()
            self.record.closed(self, getattr(sys, "last_value", None))
        except EchelonError as error:  # the last checkpoint failed in the background, say
            print(f"echelon: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # an exit handler has no other way to say that the run did not end well

    # ---- inside a step ----

    def _assembled(self, batch: Any = None) -> Parts:
        if self._choosing is not None and batch is not None:
            self._choosing.by_batch(self, batch)
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

    def _compare_batches(self, inputs: Any) -> None:
        """Once, in the first step: ranks that work on one batch together must have been given the same."""
        if self._partners is not None:
            group, self._partners = self._partners, None
            agree_on_batch(inputs, group, self._grid.ranks(*self._shared_axes))

    def answer_roll(self, call: str, *args: Any, **named: Any) -> None:
        """In the first steps, say which call this rank is about to make; where ranks step alone, when they meet."""
        if self._groups is None or ((self._local or self._roll.silent) and call in ("step", "update")):
            return
        share = call == "step" and self._parts is not None and self._partners is None and self.plan.in_parts
        sharers = self._grid.ranks(*self._shared_axes) if share else ()
        which = named.get("optimizer", args[0] if args else None) if call == "update" else None
        with peers_explained(self._here):
            self._roll.answer(call, self.steps + 1, repr(which) if which else "", (args, named), sharers)

    def _step(self, inputs: Any, count: float) -> Tally:
        run = self._fast.run if self._fast is not None else plain_pass
        loss, backward = run(inputs, self._loss)
        self._clock.lap("forward")
        tally = Tally(loss, count, self.plan.reduce_op, self._together, self._gradients.ride)
        self._gradients.add(backward, count, tally, self._clock, self.steps)
        return tally

    def _staged_step(self, inputs: Any, count: float, staged: Staged | MicroBatches) -> StagedTally:
        tally = StagedTally(count, self._is_last, self.plan.reduce_op, self._together, self.world.device)

        def train(weight: Tensor | float) -> None:
            tally.close(staged.train(inputs, weight))

        self._gradients.add(train, count, tally, self._clock, self.steps, staged.passes)
        return tally

    def _apply(self, optimizers: Mapping[str, torch.optim.Optimizer], tally: Tally | StagedTally) -> None:
        self._refuse_new_parameters()
        rate = float(next(iter(optimizers.values())).param_groups[0]["lr"])
        if not (self._gradients.overflowed or self._gradients.empty):
            self._update_weights(optimizers)
        elif self.served is not None:
            self.served.skip()
        if self._scaler.active:
            self._tell(self._scaler.update(finite=not self._gradients.overflowed))
        samples = tally.samples * (self.plan.replicas if self._local else 1)
        self._gradients.applied()
        if self._local:
            with self._explained():
                self._tell(self._local.after_step(self.steps + 1, tally.local, rate))
        self.steps += 1
        activity.steps += 1
        self._clock.lap("update")
        if self._timeline is not None:
            with self._explained():
                self._timeline = self._timeline.after(self, self._total_steps())
        self._watch.step(self.steps, tally.loss, samples, rate * self._rate_factor(self.steps), self._total_steps())
        if self._leaving is not None and self._leaving.due(self.steps, self._next_meeting):
            self._copy(at_once=True)
            self._leave(self._leaving.reason)
        if self._keeper.due(self.steps):
            self.save()
        self._copy()

    def _copy(self, at_once: bool = False) -> None:
        """Keep a copy of the state in memory, where the launcher asked for that."""
        if self._memories is None or self.trial is not None or self._groups is None:
            return
        if self._copies is None:
            from echelon.memory.copies import Copies

            groups, limit = self._groups, timedelta(seconds=self.world.timeout)
            self._copies = Copies(
                *(self._memories, self.world, self._keeper, lambda: groups.new(backend="gloo", timeout=limit)),
                *(self._has_local_statistics, self.say),
            )
        with self._explained():
            self._copies.after(self.steps, at_once)

    def _update_weights(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        parts = self._assembled()
        if self._copies is not None:
            self._copies.hold()
        if self.plan.clip is not None:
            clip_gradients(_parameters_of(optimizers), self.plan.clip, parts.census, self.world.device)
        if self.served is None or self.served.steps_here:
            with scaled_rates(optimizers.values(), self._rate_factor(self.steps + 1)):
                for optimizer in optimizers.values():
                    optimizer.step()
        if self.served is not None:
            with self._explained():
                self.served.update(self._gradients.own_samples, float(self._gradients.weights))
        if parts.shards is not None:
            parts.shards.after_step()
        stepped = [self._given[key] for key in optimizers]
        for scheduler in self.schedulers:
            if scheduler.optimizer in stepped:
                scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns where servers do it
                scheduler.step()

    def _rate_factor(self, step: int) -> float:
        begun_with = self._beginning.first_replicas if self._beginning.rule else None
        return rate_factor(self.plan, step, begun_with) * self._beginning.factor

    def _tell(self, news: str | None) -> None:
        if news is not None:
            self.say(f"step {self.steps + 1}: {news}")

    def _refuse_new_parameters(self) -> None:
        """What was given to an optimizer after the plan was made is reduced by nobody."""
        if self.world.size > 1 and _parameter_count(self._given) != self._owned:
            raise UsageError("an optimizer was given more parameters after distribute(); call distribute() again")

    def _loss(self, inputs: Any) -> Tensor:
        try:
            return self._objective(inputs)[1]
        except LossError as error:
            raise LossError(f"{self._here()}: {error}") from None

    def _note_loss(self, tally: Tally | StagedTally) -> None:
        """Raise on every rank, before the update, when the global loss is not finite.

        With a loss scale that is an overflow like others: its gradients are not finite, and the step is skipped.
        """
        if not self._scaler.active:
            self._losses.note(self.steps + 1, tally)

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Around what talks to other ranks."""
        if self._groups is None:
            raise UsageError("the engine is closed and trains no more; call distribute() for another")
        return peers_explained(self._here)

    def _here(self) -> str:
        return f"step {self.steps + 1}, rank {self.world.rank}"

    def _judge(self, batch: Any) -> list[Judged]:
        """Output and loss of a batch; of a pipeline, micro-batch by micro-batch, where the last stage is.

        It counts on the rank that speaks for it. Others have it too, since metrics of split outputs take all of them.
        """
        parts = self._assembled(batch)
        with self._explained():
            if parts.staged is not None:
                judged = parts.staged.evaluate(batch)
            else:
                judged = [Judged(batch, *self._objective(batch), count_samples(batch))]
        return judged if self._speaks else [each._replace(samples=0) for each in judged]

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 without a loss scale."""
        return self._assembled().scaler.scale

    @property
    def skipped(self) -> int:
        """Steps that an overflow has skipped so far."""
        return self._assembled().scaler.skipped

    # ---- surroundings ----

    @property
    def stream(self) -> int:
        """Which of the random streams this rank has. Ranks that share a batch compute the same, dropout included."""
        if self.served is not None and self.served.dense:
            return self.served.worker
        alike = () if self.plan.spread else ("split",)
        return self._grid.ranks(*alike)[0] if alike else self.world.rank

    @property
    def worker(self) -> int:
        """Which of the processes that train this is."""
        return self.served.worker if self.served is not None and self.served.dense else self.world.rank

    @property
    def holdings(self) -> Holdings | None:
        """What of the model this rank has; None until a pipeline's first batch has cut it."""
        return self._parts.holdings if self._parts is not None else None

    @property
    def place(self) -> dict[str, int]:
        """This rank's index along every axis of the mesh."""
        return self._grid.at

    @property
    def found(self) -> SavedPlan | None:
        """The plan as it was found (``auto``, a saved plan); None where marks and strategy said all."""
        return self._found

    def say(self, text: str, kind: Kind = "notice") -> None:
        """A line on rank 0's console, and among the run's events."""
        self._watch.say(text)
        if self.worker == 0:
            self.record.event(kind, text)

    def _note_saved(self, path: Path) -> None:
        self.record.event("saved", f"saved {path}")

    def announce(self) -> None:
        """Say what will run, and what the user may not expect."""
        held = self._parts.shards.shards if self._parts and self._parts.shards else {}  # in place of parameters
        self.record.said = [
            *announcement(self.world, self.plan, (*self._notices, *(self.served.describe() if self.served else ()))),
            *([local_statistics(self.plan)] if self._has_local_statistics() else []),
            *left_out(self.model, held, {id(p) for p in _parameters_of(self._given)}),
        ]
        for line in self.record.said:
            self._watch.say(line)

    def _chosen(self, name: str | None) -> Mapping[str, torch.optim.Optimizer]:
        if name is None:
            return self.optimizers
        if name not in self.optimizers:
            raise UsageError(f"there is no optimizer '{name}'{nearest(name, self.optimizers)}")
        return {name: self.optimizers[name]}

    def _has_local_statistics(self) -> bool:
        return self.plan.replicas > 1 and not self.plan.sync_batch_norm and bool(batch_norm_names(self.model))

    @contextlib.contextmanager
    def _as_one_model(self) -> Iterator[None]:
        """What is shown or stored is one model: replicas that differ agree on their average first."""
        if self._local:
            with self._explained(), self._local.averaged():
                yield
            return
        if self.served is not None:
            with self._explained():
                self.served.refresh()
        if self._has_local_statistics():
            average_buffers(self.model, self._grid.group(*self.plan.data_axes))
        yield

    def _total_steps(self) -> int | None:
        if self.total_steps is not None:
            return self.total_steps
        total = self._loader.total_steps if self._loader else None
        return total // self.plan.gradient_merge if total else None


def _failing() -> bool:
    """For exit handlers: whether the process ends because of an error that nobody caught."""
    return getattr(sys, "last_value", None) is not None


def _parameter_count(optimizers: Mapping[str, torch.optim.Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers.values() for group in optimizer.param_groups)


def _parameters_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]]
