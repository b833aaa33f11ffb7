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
from echelon.distributed.world import World
from echelon.engine.consistency import ConsistencyChecker
from echelon.engine.replica_sync import ReplicaSync
from echelon.engine.whole_model import assembled_state
from echelon.parallel.ema_weights import Ema, EmaWeights

if TYPE_CHECKING:
    from echelon.engine.checkpointing import CheckpointManager
    from echelon.engine.parallelize import ParallelModel
    from echelon.parameter_server.worker.session import ParameterServerSession


class MovingAverage:
    """The engine's moving average, which starts with the call ``engine.ema(decay=0.999)``.

    steps: function that returns the engine's updates so far
    """

    def __init__(
        self,
        world: World,
        company: ConsistencyChecker,
        one: ReplicaSync,
        keeper: CheckpointManager,
        served: ParameterServerSession | None,
        steps: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._world = world
        self._company = company
        self._one = one
        self._keeper = keeper
        self._served = served
        self._steps = steps
        self._say = say
        self._settings: Ema | None = None
        self._parts: ParallelModel | None = None
        self.averages: EmaWeights | None = None  #: set by the call, once the model is parallelized
        self._is_applied = False
        self._told = False  # True after the notice that the average of a checkpoint is not saved again

    def __call__(self, decay: float = 0.999, **options: Any) -> MovingAverage:
        """Start averaging the weights after each update; all ranks call it.

        The options are those of ``Ema``: warmup, gamma, power, min_decay, after, use_buffers. If training was resumed
        from a checkpoint that holds an average, that average is continued.
        """
        settings = build(Ema, {"decay": decay, **options}, "engine.ema")
        if self._settings is not None:
            raise UsageError("engine.ema() was called before; an engine has one average: call it once")
        if self._served is not None and self._served.dense:
            raise UsageError(
                "engine.ema(): parameter servers hold the parameters, and workers see them only now and then; use "
                "ParameterServer(dense='allreduce')"
            )
        self._settings = settings
        if self._served is not None:
            self._say("ema: rows of sparse tables are not averaged; parameters are")
        if self._parts is not None:
            self._begin(settings, self._parts)
        return self

    def takes(self, parts: ParallelModel) -> None:
        """Use this parallel model; an average that was requested before starts now."""
        self._parts = parts
        if self._settings is not None:
            self._begin(self._settings, parts)

    def update(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Update the average after a step of these optimizers."""
        assert self.averages is not None
        self.averages.update(optimizers.keys())
        if self._keeper.copies_averages and self._one.local is not None and self._one.local.since == 0:
            self._meet()  # in-memory snapshots need the same average on all ranks

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
        assert parts is not None
        self.refuse("engine.ema.applied()")
        self._meet("applied")
        shards = parts.shards
        follow = (lambda: None) if shards is None else partial(shards.after_step, parts.optimizers)
        local = self._one.local
        with contextlib.ExitStack() as shown:
            if local is not None:
                shown.enter_context(self._one.shown())  # averages the buffers
            with self._company.explained():
                shown.enter_context(averages.shown(follow))
            self._is_applied = True
            shown.callback(setattr, self, "_is_applied", False)
            if local is not None:
                shown.enter_context(local.met())
            yield

    def whole_state(self) -> dict[str, Tensor]:
        """Return the model's full state dict with averaged weights, in host memory, on every rank. All ranks call it.

        Names, shapes and types are those of ``engine.whole_state()``.
        """
        averages, parts = self._begun(), self._parts
        assert parts is not None
        self.refuse("engine.ema.whole_state()", "use engine.whole_state()")
        self._meet("whole_state")
        is_sharded = parts.plan.is_model_parallel or parts.plan.shard is not None
        with self._company.explained(), self._one.shown():
            control = self._world.control if is_sharded else None
            return assembled_state(parts.holdings, averages.as_weights(), control)

    def refuse(self, call: str, instead: str = "leave 'with engine.ema.applied()' first") -> None:
        """Raise ``UsageError`` within ``applied()``, for calls that need the weights of training."""
        if self._is_applied:
            raise UsageError(f"{call}: the weights are their averages here; {instead}")

    def before_save(self) -> None:
        """Synchronize the average over all ranks, or log that the average of the checkpoint is not saved again."""
        if self.averages is not None:
            self.refuse("engine.save()")
            self._meet()
        elif self._settings is None and self._keeper.holds_average and not self._told:
            self._told = True
            self._say(
                "ema: the checkpoint that was resumed from has averaged weights, and this run has none, so that they "
                "are not saved again; call engine.ema(...) after distribute() to go on with them"
            )

    def _begin(self, settings: Ema, parts: ParallelModel) -> None:
        averages = EmaWeights(settings, parts.holdings, _exact_weights(parts.optimizers))
        stored = self._keeper.average_from(self._steps())
        if stored is not None:
            averages.restore(stored)
            self._say(f"ema: resumed after {averages.updates} updates")
        self.averages = self._keeper.average = averages

    def _begun(self) -> EmaWeights:
        if self.averages is None and self._settings is None:
            raise UsageError("engine.ema: there is no average; call engine.ema(decay=0.999) before training")
        if self.averages is None:
            raise UsageError("engine.ema: no batch has cut the pipeline yet; call step() first, or give sample=")
        return self.averages

    def _meet(self, call: str = "") -> None:
        """Average the moving averages of replicas under local SGD: this gives the moving average of their mean.

        call: name of the collective call to compare on all ranks first; "" for none
        """
        assert self.averages is not None
        assert self._parts is not None
        local, sharded = self._one.local is not None, self._parts.shards is not None
        if call and (local or sharded or call == "whole_state"):
            with calling(f"ema.{call}", self._steps() + 1, "communicate"):
                self._company.answer_roll(f"ema.{call}")
        if local:
            with self._company.explained():
                average(self.averages.plain())


def _exact_weights(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Callable[[], Tensor]]:
    """Return functions, by parameter name, that read weights which ``LowMemory`` training keeps in two halves."""
    kept: list[Any] = [optimizer for optimizer in optimizers.values() if hasattr(optimizer, "exact_weight")]
    if any(optimizer.fills_host for optimizer in kept):
        raise UsageError(
            "engine.ema(): low_memory keeps the remainders of weights in host memory here, from where an average "
            "cannot follow them in every step; take LowMemory(state='device')"
        )
    return {entry.name: partial(optimizer.exact_weight, entry) for optimizer in kept for entry in optimizer.entries}
