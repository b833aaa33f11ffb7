"""``RunContext``: what a run has before its plan is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from echelon.base.start_times import start_times
from echelon.checkpoint.checkpoint_settings import Checkpoint
from echelon.checkpoint.in_memory.snapshot_hosts import SnapshotHosts
from echelon.construction.deferred_weights import DeferredWeights
from echelon.distributed.process_groups import ProcessGroups
from echelon.distributed.world import World
from echelon.engine.automatic_checkpoints import AutomaticCheckpoints
from echelon.engine.consistency import ConsistencyChecker
from echelon.engine.elastic import Elastic, ElasticState
from echelon.engine.loader_positions import LoaderPositions
from echelon.engine.lr_schedules import AnyScheduler, LRSchedulers
from echelon.engine.on_nonfinite import OnNonfinite
from echelon.engine.preemption import PreemptionHandler
from echelon.engine.progress import RunProgress
from echelon.engine.server_backend import ServerBackend
from echelon.engine.shutdown import ExitHook
from echelon.observability.metrics import Log, MetricsLogger
from echelon.observability.metrics.run_logger import RunLogger
from echelon.observability.runlog.events import Kind
from echelon.observability.runlog.run_log_writer import RunLogWriter
from echelon.observability.trace.trace_session import requested_session
from echelon.parallel.objective import LossFunction
from echelon.parallel.step_guard import StepGuard

if TYPE_CHECKING:
    from echelon.engine.early_calls import EarlyCalls
    from echelon.engine.engine import Engine
    from echelon.engine.planned_run import PlannedRun


class EngineMaker(Protocol):
    """``Engine``, or a subclass of it with further arguments bound."""

    def __call__(self, planned: PlannedRun, batch: Any, early: EarlyCalls, /) -> Engine: ...


class TrialRun(Protocol):
    """The task of a process that only times a candidate plan of ``auto``."""

    def run(self, engine: Engine, batches: Any) -> None:
        """Time some steps and end the process; do nothing in the steps themselves."""


class RunContext:
    """The objects of one run that do not depend on its plan: the user's objects, logs, checks and settings.

    optimizers:  optimizers of the user, which schedulers drive even if others take the steps
    backend:     state on parameter servers
    make_engine: creates the engine when plan and model are known
    initial:     parameters whose values are still to be made
    trial:       task of a process that times a candidate plan; None in other processes
    on_nonfinite: reaction to a loss or gradients that are not finite
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        loss: LossFunction | None,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Sequence[AnyScheduler],
        checkpoint: Checkpoint | None,
        log: Log,
        backend: ServerBackend,
        elastic: Elastic | None,
        make_engine: EngineMaker,
        initial: DeferredWeights,
        trial: TrialRun | None = None,
        on_nonfinite: OnNonfinite | None = None,
    ) -> None:
        self.on_nonfinite = on_nonfinite or OnNonfinite()
        self.world, self.model, self.loss, self.optimizers = world, model, loss, optimizers
        self.backend, self.make_engine, self.trial = backend, make_engine, trial
        self.initial = initial
        self.progress = RunProgress(first=self._note_start)
        self.schedules = LRSchedulers(schedulers, optimizers.values(), self.say)
        self.checker = ConsistencyChecker(
            world, ProcessGroups(world.backend), self.progress, lambda line: self.say(line, "warning")
        )
        self.guard = StepGuard(optimizers.values(), alone=world.size == 1 and not backend.pushes, say=self.say)
        self.log, self.metrics = log, MetricsLogger(log, world.device, world.rank)
        self.timeline = requested_session(log, self.metrics.directory)
        self.record = RunLogWriter(self.metrics.directory, world.rank, self.metrics.has_trackers)
        self.voice = RunLogger(self.metrics, self.record, speaks=world.rank == 0)
        self.elastic = ElasticState(elastic, world.mesh_size)
        self.positions = LoaderPositions(self.elastic, self.say)
        self.checkpoints = AutomaticCheckpoints(world, checkpoint, self.say)
        #: launchers that hold in-memory snapshots; None without them
        self.snapshots = self._snapshot_hosts()
        self.preemption = PreemptionHandler(world)
        self.exit = ExitHook()
        self.metrics.connect(self.record, lambda line: self.say(line, "warning"), self.exit.renew)
        self.exit.add(self._finish)

    @property
    def kept_directory(self) -> Path | None:
        """The directory that the run keeps over restarts: that of its checkpoints, else that of its log."""
        saved = self.checkpoints.directory
        return self.metrics.directory if saved is None else Path(saved)

    def _snapshot_hosts(self) -> SnapshotHosts | None:
        if self.trial is not None or SnapshotHosts.find() is None:
            return None
        if self.backend.pushes:
            self.say(
                "in-memory snapshots disabled: they hold no rows of sparse tables; after a failure training goes on "
                "from the newest checkpoint"
            )
            return None
        return SnapshotHosts.for_next_engine()

    def say(self, text: str, kind: Kind = "notice") -> None:
        """Write a line to rank 0's console and to the run's events."""
        self.voice.say(text, kind)

    def _note_start(self) -> None:
        """Record how long this process took to its first step."""
        start_times.end("first step")
        self.record.started(start_times.seconds())

    def close(self) -> None:
        """Finish background work and close connections."""
        self.exit.now()
        self.guard.close()
        self.checker.close()
        self.checkpoints.locks.release()

    def _finish(self, error: BaseException | None) -> None:
        self.metrics.close(error)
        self.preemption.close()
        self.record.closed(self.progress.steps, error)
