"""Who looks on while an engine trains: see recorder.py and replayer.py."""

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
    from echelon.engine.engine import Engine
    from echelon.tools.verify.verify_engine import VerifyEngine

#: The file with the weights that the ranks began with.
INITIAL = "initial.safetensors"


class VerifyObserver(ABC):
    """Asked by ``distribute()`` for its terms, and then by ``VerifyEngine``, in this order, in every update."""

    question: VerifyRequest

    def terms(self, asked: DistributeArgs) -> DistributeArgs:
        """What is gone by in their place."""
        return asked

    def attend(self, engine: Engine) -> Engine:
        """Look on from now on. Another class for the same object: all that it has been told stays as it is."""
        from echelon.tools.verify.verify_engine import VerifyEngine

        engine.__class__ = VerifyEngine
        assert isinstance(engine, VerifyEngine)
        engine.witness = self
        self.question.note("begun", 1)
        self.begin(engine)
        return engine

    @abstractmethod
    def begin(self, engine: VerifyEngine) -> None:
        """The script is about to train, by ``engine.step`` or by a loop of its own."""

    @abstractmethod
    def loader(self, engine: VerifyEngine, loader: Loader) -> Loader:
        """One that the script is given."""

    # ---- a loop of its own ----

    @abstractmethod
    def backward(self, engine: VerifyEngine, loss: Tensor) -> Tensor:
        """A backward is about to begin; of which loss."""

    @abstractmethod
    def update(self, engine: VerifyEngine, optimizer: str | None, samples: float | None) -> None:
        """Of what was added up since the last one."""

    # ---- engine.step ----

    @abstractmethod
    def batch(self, engine: VerifyEngine, inputs: Any, count: float) -> tuple[Any, float]:
        """A forward and backward is about to begin; with which batch, and how many samples it counts for."""

    @abstractmethod
    def listening(self, engine: VerifyEngine) -> AbstractContextManager[Any]:
        """Around the forward."""

    @abstractmethod
    def loss(self, engine: VerifyEngine, tally: GlobalLoss | PipelineGlobalLoss, count: float) -> None:
        """It is over."""

    # ---- both ----

    @abstractmethod
    def gradients(self, engine: VerifyEngine, optimizers: Sequence[str]) -> bool:
        """An update of these is about to begin; whether it takes place."""

    @abstractmethod
    def rate(self, step: int, factor: float) -> float:
        """What the learning rate is multiplied by."""

    @abstractmethod
    def applied(self, engine: VerifyEngine) -> None:
        """It is over. After the last one this does not return."""


def gather_from_ranks(engine: VerifyEngine, message: Any) -> list[Any]:
    """Every rank's message."""
    return [message] if engine.world.control is None else gather_json(message, engine.world.control)


def mean_loss(losses: Sequence[Sequence[float]]) -> list[float]:
    """The mean of losses, each with the samples it counts for; and all samples."""
    total = sum(count for _, count in losses)
    return [sum(loss * count for loss, count in losses if count) / total if total else 0.0, total]


def share(loss: float, counted: float, counts: dict[str, float]) -> dict[str, Any]:
    """Return one replica's part of a pass, or one process's whole; see ``causes.Share``."""
    return {"loss": loss, "counted": counted, "counts": counts}
