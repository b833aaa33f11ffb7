"""One small message a step: how many samples did all ranks see, and what was the mean loss over them?

It leaves before backward and is read when the first bucket needs the divisor, so its latency hides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.parallel.collective import start_small_sum


class Tally:
    """The global sample count and loss of one forward pass. ``group=None``: this process is the whole job."""

    def __init__(self, loss: Tensor, samples: float, op: str, group: dist.ProcessGroup | None) -> None:
        self.local = loss.detach()  #: this rank's own mean loss
        self._alone = group is None
        self._samples = samples
        self._sum = op == "sum"
        if group is None:
            return
        weight = 1.0 if self._sum else samples
        weighted = self.local.double() * weight if samples else self.local.new_zeros((), dtype=torch.double)
        count = torch.full((), samples, dtype=torch.double, device=loss.device)
        self._answer = start_small_sum(torch.stack([weighted, count]), group, "loss and samples")
        self._total: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """Mean loss over all samples of all ranks (sum over ranks of their means, with op "sum")."""
        if self._alone:
            return self.local
        total = self._received()
        return (total[0] if self._sum else total[0] / total[1]).to(self.local.dtype)

    @property
    def samples(self) -> Tensor | float:
        """Samples over all ranks: a number on the CPU, a tensor on a GPU (reading it there would stall the step)."""
        if self._alone:
            return self._samples
        count = self._received()[1]
        return count if count.is_cuda else float(count)

    def _received(self) -> Tensor:
        if self._total is None:
            self._total = self._answer()
        return self._total


class StagedTally:
    """The same for a pipeline, whose loss only its last stage knows, and only at the end.

    ``speaks``: whether this rank counts, or only listens: of all that work on one batch, one speaks
    """

    def __init__(self, samples: float, speaks: bool, op: str, group: dist.ProcessGroup | None, device: torch.device):
        self._alone, self._own, self._sum, self._group, self._speaks = (
            group is None,
            samples,
            op == "sum",
            group,
            speaks,
        )
        self.local = torch.zeros((), device=device)
        self._total: Tensor | None = None
        if group is not None:
            count = torch.full((), samples if speaks else 0.0, dtype=torch.double, device=device)
            self._count = start_small_sum(count.reshape(1), group, "number of samples")
            self._counted: Tensor | None = None

    def close(self, loss: Tensor) -> None:
        """Backward is over, and ``loss`` the mean over this rank's batch, as far as it knows it."""
        self.local = loss.detach()
        if self._group is None:
            return
        weight = (1.0 if self._sum else self._own) if self._own else 0.0
        mine = self.local.double() * weight if weight else torch.zeros_like(self.local, dtype=torch.double)
        self._answer = start_small_sum(mine.reshape(1), self._group, "loss")

    @property
    def loss(self) -> Tensor:
        if self._alone:
            return self.local
        if self._total is None:
            self._total = self._answer()[0]
        samples = self.samples
        return (self._total if self._sum else self._total / samples).to(self.local.dtype)

    @property
    def samples(self) -> Tensor | float:
        if self._alone:
            return self._own
        if self._counted is None:
            self._counted = self._count()[0]
        return self._counted if self._counted.is_cuda else float(self._counted)
