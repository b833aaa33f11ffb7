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
        self._answer = start_small_sum(torch.stack([weighted, count]), group)
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
