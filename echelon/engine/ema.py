"""``engine.ema``: an exponential moving average of the weights, for evaluation and export, in every layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.base.config import build
from echelon.base.errors import UsageError
from echelon.distributed.activity import calling
from echelon.distributed.replicas import average
from echelon.engine.replica_sync import ReplicaSync
from echelon.engine.run_context import RunContext
from echelon.engine.whole_model import assembled_state
from echelon.parallel.ema_weights import Ema, EmaWeights

if TYPE_CHECKING:
    from echelon.checkpoint import Stored
    from echelon.engine.parallelize import ParallelModel


NO_AVERAGE = "engine.ema: there is no average; call engine.ema(decay=0.999) before training"
NO_MODEL = "engine.ema: no batch has cut the pipeline yet; call step() first, or give sample="


def ema_settings(decay: float, options: Mapping[str, Any], run: RunContext, known: Ema | None) -> Ema:
    """Return the settings of a call ``engine.ema(decay, **options)``.

    known: settings of an earlier call, after which another is an error
    """
    settings = build(Ema, {"decay": decay, **options}, "engine.ema")
    if known is not None:
        raise UsageError("engine.ema() was called before; an engine has one average: call it once")
    if run.backend.dense:
        raise UsageError(
            "engine.ema(): parameter servers hold the parameters, and workers see them only now and then; use "
            "ParameterServer(dense='allreduce')"
        )
    if run.backend.pushes:
        run.say("ema: rows of sparse tables are not averaged; parameters are")
    return settings


class MovingAverage:
    """The engine's moving average, which starts with the call ``engine.ema(decay=0.999)``.

    settings: settings of a call that came before the engine was created; None without one
    """

    def __init__(
        self,
        run: RunContext,
        parts: ParallelModel,
        one: ReplicaSync,
        answer_roll: Callable[[str], None],
        settings: Ema | None = None,
    ) -> None:
        self._run, self._parts, self._one, self._answer_roll = run, parts, one, answer_roll
        self._say, self._settings = run.say, settings
        self._stored: Stored | None = None  # a checkpoint whose averaged weights have not been restored yet
        self.averages: EmaWeights | None = None if settings is None else self._begun_with(settings)
        self._is_applied = False
        self._has_warned = False  # True after the notice that the average of a checkpoint is not saved again

    def __call__(self, decay: float = 0.999, **options: Any) -> MovingAverage:
        """Start averaging the weights after each update; all ranks call it.

        The options are those of ``Ema``: warmup, gamma, power, min_decay, after, use_buffers. If training was resumed
        from a checkpoint that holds an average, that average is continued.
        """
        self._settings = ema_settings(decay, options, self._run, self._settings)
        self.averages = self._begun_with(self._settings)
        return self

    def restore(self, stored: Stored) -> None:
        """Restore the average, or keep the checkpoint for an average that starts at its step."""
        self._stored = None
        if self.averages is not None:
            self.averages.restore(stored)
        elif stored.facts.get("ema") is not None:
            self._stored = stored

    def update(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Update the average after a step of these optimizers."""
        assert self.averages is not None
        self.averages.update(optimizers.keys())
        local = self._parts.local
        if self._run.snapshots is not None and local is not None and local.since == 0:
            self._sync()  # in-memory snapshots need the same average on all ranks

    @property
    def updates(self) -> int:
        """The number of updates of the average."""
        return self._begun().updates

    @property
    def decay(self) -> float:
        """The decay of the next update."""
        averages = self._begun()
        return averages.settings.decay_after(averages.updates)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's weights by their averages within the context. All ranks enter it together."""
        averages, parts = self._begun(), self._parts
        self.refuse("engine.ema.applied()")
        self._sync("applied")
        shards = parts.shards
        follow = (lambda: None) if shards is None else partial(shards.after_step, parts.optimizers)
        local = parts.local
        with contextlib.ExitStack() as shown:
            if local is not None:
                shown.enter_context(self._one.shown())  # averages the buffers
            with self._run.checker.explained():
                shown.enter_context(averages.shown(follow))
            self._is_applied = True
            shown.callback(setattr, self, "_is_applied", False)
            if local is not None:
                shown.enter_context(local.in_sync())
            yield

    def whole_state(self) -> dict[str, Tensor]:
        """Return the model's full state dict with averaged weights, in host memory, on every rank. All ranks call it.

        Names, shapes and types are those of ``engine.whole_state()``.
        """
        averages, parts = self._begun(), self._parts
        self.refuse("engine.ema.whole_state()", "use engine.whole_state()")
        self._sync("whole_state")
        is_sharded = parts.plan.is_model_parallel or parts.plan.shard is not None
        with self._run.checker.explained(), self._one.shown():
            control = self._run.world.control if is_sharded else None
            return assembled_state(parts.local_state, averages.as_weights(), control)

    def refuse(self, call: str, instead: str = "leave 'with engine.ema.applied()' first") -> None:
        """Raise ``UsageError`` within ``applied()``, for calls that need the weights of training."""
        if self._is_applied:
            raise UsageError(f"{call}: the model holds averaged weights here; {instead}")

    def before_save(self) -> None:
        """Synchronize the average over all ranks, or log that the average of the checkpoint is not saved again."""
        if self.averages is not None:
            self.refuse("engine.save()")
            self._sync()
        elif self._settings is None and self._stored is not None and not self._has_warned:
            self._has_warned = True
            self._say(
                "ema: the checkpoint has averaged weights and this run keeps no average, so that they are not saved "
                "again; "
                "call engine.ema(...) after distribute() to continue the average"
            )

    def _begun_with(self, settings: Ema) -> EmaWeights:
        averages = EmaWeights(settings, self._parts.local_state, _exact_weights(self._parts.optimizers))
        stored, self._stored = self._stored, None
        if stored is not None and stored.step == self._run.progress.steps:
            averages.restore(stored)
            self._say(f"ema: resumed after {averages.updates} updates")
        return averages

    def _begun(self) -> EmaWeights:
        if self.averages is None:
            raise UsageError(NO_AVERAGE)
        return self.averages

    def _sync(self, call: str = "") -> None:
        """Average the moving averages of replicas under local SGD: this gives the moving average of their mean.

        call: name of the collective call to compare on all ranks first; "" for none
        """
        assert self.averages is not None
        local, sharded = self._parts.local is not None, self._parts.shards is not None
        if call and (local or sharded or call == "whole_state"):
            with calling(f"ema.{call}", self._run.checker.step, "communicate"):
                self._answer_roll(f"ema.{call}")
        if local:
            with self._run.checker.explained():
                average(self.averages.plain())


def _exact_weights(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Callable[[], Tensor]]:
    """Return functions, by parameter name, that read weights which ``LowMemory`` training keeps in two halves."""
    kept: list[Any] = [optimizer for optimizer in optimizers.values() if hasattr(optimizer, "exact_weight")]
    if any(optimizer.fills_host for optimizer in kept):
        raise UsageError(
            "engine.ema(): low_memory keeps the remainders of weights in host memory here, where an average cannot "
            "follow them in every step; use LowMemory(state='device')"
        )
    return {entry.name: partial(optimizer.exact_weight, entry) for optimizer in kept for entry in optimizer.entries}
