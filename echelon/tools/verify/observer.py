"""Interface of the observers that ``echelon verify`` attaches to an engine: see run_recorder.py and replayer.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from echelon.api.distribute_args import DistributeArgs
from echelon.data import Loader
from echelon.distributed.collectives import gather_json
from echelon.parallel.data.global_loss import GlobalLoss, PipelineGlobalLoss
from echelon.tools.verify.verify_request import VerifyRequest

if TYPE_CHECKING:
    from echelon.distributed.world import World
    from echelon.engine.deferred_engine import DeferredEngine
    from echelon.engine.early_calls import EarlyCalls
    from echelon.engine.engine import Engine
    from echelon.engine.planned_run import PlannedRun
    from echelon.engine.run_context import RunContext
    from echelon.plan import Plan
    from echelon.tools.verify.verify_engine import VerifyEngine

#: The file with the initial weights of the ranks.
INITIAL = "initial.safetensors"


class VerifyObserver(ABC):
    """Observes and modifies the training of one process.

    ``distribute()`` calls ``terms``; ``VerifyEngine`` then calls the other methods, in the order below, in each update.
    """

    question: VerifyRequest

    def terms(self, requested: DistributeArgs) -> DistributeArgs:
        """Return the arguments to use in place of those given to ``distribute()``."""
        return requested

    def make_engine(self, planned: PlannedRun, batch: Any, early: EarlyCalls) -> Engine:
        """Create an engine that this object observes."""
        from echelon.tools.verify.verify_engine import VerifyEngine

        return VerifyEngine(self, planned, batch, early)

    def defer(self, run: RunContext, plan: Plan, **known: Any) -> DeferredEngine:
        """Return the engine that waits for its first batch."""
        from echelon.tools.verify.verify_engine import DeferredVerifyEngine

        return DeferredVerifyEngine(self, run, plan, **known)

    def attach(self, engine: Engine) -> None:
        """Begin to observe the engine that ``distribute()`` returns."""
        from echelon.tools.verify.verify_engine import VerifyEngine

        self.question.note("begun", 1)
        if isinstance(engine, VerifyEngine):
            self.begin(engine)

    @abstractmethod
    def begin(self, engine: VerifyEngine) -> None:
        """Prepare for training, before the script calls ``engine.step`` or starts a custom loop."""

    @abstractmethod
    def loader(self, world: World, loader: Loader) -> Loader:
        """Return the loader that the script gets in place of ``loader``."""

    # ---- custom loop ----

    @abstractmethod
    def backward(self, engine: VerifyEngine, loss: Tensor) -> Tensor:
        """Return the loss to backpropagate, before a backward begins."""

    @abstractmethod
    def update(self, engine: VerifyEngine, optimizer: str | None, samples: float | None) -> None:
        """Handle an update with the losses accumulated since the last update, before the update is applied."""

    # ---- engine.step ----

    @abstractmethod
    def batch(self, engine: VerifyEngine, inputs: Any, count: float) -> tuple[Any, float]:
        """Return the batch to use and the samples it counts for, before a forward and backward begin."""

    @abstractmethod
    def listening(self, engine: VerifyEngine) -> AbstractContextManager[Any]:
        """Return a context for the forward."""

    @abstractmethod
    def loss(self, engine: VerifyEngine, global_loss: GlobalLoss | PipelineGlobalLoss, count: float) -> None:
        """Record the loss after a forward and backward."""

    # ---- both ----

    @abstractmethod
    def gradients(self, engine: VerifyEngine, optimizers: Sequence[str]) -> bool:
        """Record or compare the gradients of ``optimizers`` before an update; return False to skip the update."""

    @abstractmethod
    def rate(self, step: int, factor: float) -> float:
        """Return the factor for the learning rate of this step."""

    @abstractmethod
    def applied(self, engine: VerifyEngine) -> None:
        """Record or compare the weights after an update. After the last update this method ends the process."""


def gather_from_ranks(engine: VerifyEngine, message: Any) -> list[Any]:
    """Gather one JSON message per rank. All ranks call it."""
    return [message] if engine.world.control is None else gather_json(message, engine.world.control)


def mean_loss(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the sample-weighted mean of (loss, samples) pairs, and the total number of samples."""
    total = sum(count for _, count in losses)
    return [sum(loss * count for loss, count in losses if count) / total if total else 0.0, total]


def share(loss: float, counted: float, counts: dict[str, float]) -> dict[str, Any]:
    """Return the record of one pass of one replica, or of one process; see ``causes.Share``."""
    return {"loss": loss, "counted": counted, "counts": counts}
