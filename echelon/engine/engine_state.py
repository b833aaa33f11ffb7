"""``EngineState``: the parts of an engine, and the properties that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.distributed.world import World
from echelon.engine.lr_schedules import AnyScheduler
from echelon.engine.run_context import RunContext
from echelon.engine.run_view import RunView
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.engine.best_checkpoint import BestCheckpoint
    from echelon.engine.checkpointing import CheckpointManager
    from echelon.engine.ema import MovingAverage
    from echelon.engine.forward_backward import ForwardBackward
    from echelon.engine.local_gradients import LocalGradients
    from echelon.engine.nonfinite import NonfiniteSteps
    from echelon.engine.parallelize import ParallelModel
    from echelon.engine.planned_run import PlannedRun
    from echelon.engine.replica_sync import ReplicaSync
    from echelon.engine.resume import StateRestorer
    from echelon.engine.update import OptimizerUpdate
    from echelon.observability.metrics.step_clock import StepClock
    from echelon.parameter_server.worker.session import ParameterServerSession


class EngineState:
    """The state of an engine, which the groups of its calls share: training, own loops and checkpoints."""

    _run: RunContext
    _planned: PlannedRun
    _parts: ParallelModel
    _clock: StepClock
    _passes: ForwardBackward
    _updates: OptimizerUpdate
    _local_gradients: LocalGradients
    _replicas: ReplicaSync
    _ema: MovingAverage
    _checkpoints: CheckpointManager
    _best: BestCheckpoint
    _restorer: StateRestorer
    _nonfinite: NonfiniteSteps
    _own_view: RunView
    _output: Any

    @property
    def world(self) -> World:
        """This process: its place in the job, in the mesh, and among the batches of a step."""
        return self._planned.world

    @property
    def model(self) -> nn.Module:
        """The model; under ``split``, a pipeline or ``shard`` a rank holds only parts of it."""
        return self._run.model

    @property
    def plan(self) -> Plan:
        """The plan that every rank runs."""
        return self._parts.plan

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers that take the steps."""
        return self._parts.optimizers

    @property
    def served(self) -> ParameterServerSession | None:
        """The session with parameter servers; None if neither tables nor parameters live on servers."""
        return self._run.backend.session

    @property
    def steps(self) -> int:
        """Updates so far, including those skipped because of an overflow or a loss that is not finite."""
        return self._run.progress.steps

    @property
    def total_steps(self) -> int | None:
        """The last step of the run if the loop ends before its epochs do; None otherwise. Setting it is optional."""
        return self._run.progress.total

    @total_steps.setter
    def total_steps(self, total: int | None) -> None:
        self._run.progress.end_at(total)

    @property
    def scheduler(self) -> Sequence[AnyScheduler]:
        """The schedulers that the engine steps."""
        return self._run.schedules.all

    @scheduler.setter
    def scheduler(self, given: AnyScheduler | Sequence[AnyScheduler]) -> None:
        """Set schedulers after ``distribute`` and before training, if they need the length of the loader."""
        self._run.schedules.attach_late(given)

    @property
    def ema(self) -> MovingAverage:
        """The moving average of the weights, which ``engine.ema(decay=0.999)`` starts."""
        return self._ema

    @property
    def output(self) -> Any:
        """The output of the model in the last ``step(..., outputs=True)``.

        It is None on all stages of a pipeline but the last.
        """
        return self._output

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before backward; 1 without loss scaling."""
        return self._parts.scaler.scale

    @property
    def skipped(self) -> int:
        """The number of steps skipped because of an overflow, or by ``on_nonfinite="skip"``."""
        return self._parts.scaler.skipped

    def log(self, values: Mapping[str, Any] | None = None, /, *, reduce: str | None = "mean", **named: Any) -> None:
        """Write user-defined numbers to the console, the files, the report and the trackers, merged over ranks.

        values: numbers, or tensors of one number, by name
        reduce: rule over the replicas that log a name: ``mean`` (default), ``sum``, ``max``, ``min``; ``last`` or None
                for rank 0's own number
        named:  further numbers by name

        >>> engine.log(perplexity=12.5)
        """
        self._run.metrics.log(self.steps, {**(values or {}), **named}, reduce)

    @property
    def _view(self) -> RunView:
        return self._own_view

    def _answer_roll(self, call: str, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> None:
        self._run.checker.answer_roll(call, self._planned.batches, args, named)
