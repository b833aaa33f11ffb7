"""``FiniteLossCheck``: ends a run on every rank if the loss is not finite, before that state is saved."""

from __future__ import annotations

import math
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import LossError
from echelon.distributed.collectives import gather_json
from echelon.observability.metrics.deferred_scalar import DeferredScalar


class StepLoss(Protocol):
    """The global loss of a step, and the loss of this rank."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def local(self) -> Tensor: ...


class FiniteLossCheck:
    """Checks every global loss. On a GPU it checks one step later, because the host would have to wait.

    group: process group to find the rank with the bad loss; ``None`` if each rank has its own loss
    """

    def __init__(self, rank: int, on_gpu: bool, group: dist.ProcessGroup | None) -> None:
        self._rank, self._group = rank, group
        self.lag = 1 if on_gpu else 0  #: steps between a loss and its check
        self._waiting: list[tuple[int, DeferredScalar, StepLoss]] = []

    def note(self, step: int, step_loss: StepLoss) -> None:
        if self.lag or self._waiting:
            self._waiting.append((step, DeferredScalar(step_loss.loss, "loss"), step_loss))
            self._look(self.lag)
        elif not math.isfinite(step_loss.loss.item()):
            self._refuse(step, step_loss)

    def look(self) -> None:
        """Check all pending losses now, so that no state is saved whose loss was not checked."""
        self._look(0)

    def _look(self, lag: int) -> None:
        while len(self._waiting) > lag:
            step, loss, step_loss = self._waiting.pop(0)
            if not math.isfinite(loss.read()):
                self._refuse(step, step_loss)

    def _refuse(self, step: int, step_loss: StepLoss) -> None:
        losses = {self._rank: float(step_loss.local)}
        if self._group is not None:
            losses = dict(enumerate(gather_json(losses[self._rank], self._group)))
        bad = [rank for rank, value in losses.items() if not math.isfinite(value)]
        where = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}"
        raise LossError(
            f"the loss is {losses[bad[0]]} at step {step} on {where}; lower the learning rate, clip gradients, or "
            "look at that batch"
        )
