"""``FiniteLossCheck``: ends a run on every rank if the loss is not finite, before that state is saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import LossError
from echelon.distributed.collectives import gather_json
from echelon.observability.metrics.deferred_scalar import DeferredScalar

#: Returns a text that names a batch; None if it is not known.
BatchText = Callable[[], str] | None
#: Number of ranks whose batches a message names.
NAMED = 4


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
        self._waiting: list[tuple[int, DeferredScalar, StepLoss, BatchText]] = []

    def note(self, step: int, step_loss: StepLoss, batch: BatchText) -> None:
        """Check the loss of a step, or check it later.

        batch: returns a text that names this rank's batch; None if that is not known
        """
        if self.lag or self._waiting:
            self._waiting.append((step, DeferredScalar(step_loss.loss, "loss"), step_loss, batch))
            self._check_until(self.lag)
        elif not math.isfinite(step_loss.loss.item()):
            self._refuse(step, step_loss, batch)

    def check_all(self) -> None:
        """Check all pending losses now, so that no state is saved whose loss was not checked."""
        self._check_until(0)

    def _check_until(self, lag: int) -> None:
        while len(self._waiting) > lag:
            step, loss, step_loss, batch = self._waiting.pop(0)
            if not math.isfinite(loss.read()):
                self._refuse(step, step_loss, batch)

    def _refuse(self, step: int, step_loss: StepLoss, batch: BatchText) -> None:
        own = float(step_loss.local), batch and batch()
        everyone = {self._rank: own}
        if self._group is not None:
            everyone = dict(enumerate(gather_json(own, self._group)))
        bad = [rank for rank, (value, _) in everyone.items() if not math.isfinite(value)]
        where = ranks_text(bad) + batches_text({rank: everyone[rank][1] for rank in bad})
        raise LossError(
            f"the loss is {everyone[bad[0]][0]} at step {step} on {where}; lower the learning rate, clip gradients, or "
            "look at that batch"
        )


def ranks_text(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def batches_text(batches: dict[int, str | None]) -> str:
    """Return the batches of these ranks in parentheses; nothing if they are not known."""
    known = {rank: text for rank, text in batches.items() if text}
    if not known:
        return ""
    if len(set(known.values())) == 1:
        return f" ({next(iter(known.values()))})"
    more = "; ..." if len(known) > NAMED else ""
    return f" ({'; '.join(f'rank {rank}: {text}' for rank, text in list(known.items())[:NAMED])}{more})"
