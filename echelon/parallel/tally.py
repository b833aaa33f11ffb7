"""One small message a step: how many samples did all ranks see, and what was the mean loss over them?

It leaves before backward and is read when the first bucket needs the divisor, so its latency hides. On a CPU, where a
message costs more than its latency, it rides with the last bucket of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.parallel.collective import start_small_sum

#: A count travels as two numbers, so that it stays exact among single precision's: how many of so many, and the rest.
PACK = 4096.0


#: Of all ranks: losses times samples, and samples.
Sums = tuple[Tensor, Tensor] | tuple[float, float]


class TakesAlong(Protocol):
    """What sums some numbers over the same ranks anyhow, after backward."""

    def take_along(self, numbers: Sequence[float]) -> Callable[[], list[float]]: ...


class Tally:
    """The global sample count and loss of one forward pass. ``group=None``: this process is the whole job.

    ride: in place of a message of its own; then nothing is known before gradients are reduced
    """

    def __init__(
        self, loss: Tensor, samples: float, op: str, group: dist.ProcessGroup | None, ride: TakesAlong | None = None
    ) -> None:
        self.local = loss.detach()  #: this rank's own mean loss
        self._alone = group is None
        self._samples = samples
        self._sum = op == "sum"
        self.rides = ride is not None
        self._total: Sums | None = None
        self._loss = self.local if group is None else None
        if group is None:
            return
        self._answer: Callable[[], Sums]
        weight = 1.0 if self._sum else samples
        if ride is not None:
            own = self.local.item() * weight if samples else 0.0
            self._answer = _unpacked(ride.take_along((own, samples // PACK, samples % PACK)))
            return
        weighted = self.local.double() * weight if samples else self.local.new_zeros((), dtype=torch.double)
        count = torch.full((), samples, dtype=torch.double, device=loss.device)
        answer = start_small_sum(torch.stack([weighted, count]), group, "loss and samples")
        self._answer = lambda: _pair(answer())

    @property
    def loss(self) -> Tensor:
        """Mean loss over all samples of all ranks (sum over ranks of their means, with op "sum")."""
        if self._loss is None:
            self._loss = self._mean(self._received())
        return self._loss

    def _mean(self, sums: Sums) -> Tensor:
        total, count = sums
        if isinstance(total, Tensor):
            return (total if self._sum else total / count).to(self.local.dtype)
        mean = total if self._sum else total / float(count) if count else math.nan
        return torch.scalar_tensor(mean, dtype=self.local.dtype)

    @property
    def samples(self) -> Tensor | float:
        """Samples over all ranks: a number on the CPU, a tensor on a GPU (reading it there would stall the step)."""
        if self._alone:
            return self._samples
        count = self._received()[1]
        return count if isinstance(count, Tensor) and count.is_cuda else float(count)

    def _received(self) -> Sums:
        if self._total is None:
            self._total = self._answer()
        return self._total


def _pair(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[0], both[1]


def _unpacked(sums: Callable[[], list[float]]) -> Callable[[], tuple[float, float]]:
    def answer() -> tuple[float, float]:
        loss, packs, rest = sums()
        return loss, packs * PACK + rest

    return answer


class StagedTally:
    """The same for a pipeline, whose loss only its last stage knows, and only at the end.

    rides:  never: several ranks know of one batch
    speaks: whether this rank counts, or only listens: of all that work on one batch, one speaks
    late:   the number of samples is sent with the loss, where nobody must know it before
    """

    rides = False

    def __init__(
        self,
        samples: float,
        speaks: bool,
        op: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
        late: bool = False,
    ) -> None:
        self._alone, self._own, self._sum, self._group = group is None, samples, op == "sum", group
        self.local = torch.zeros((), device=device)
        self._sums: list[Tensor] = []  # over all ranks, as far as they are here: samples, losses times samples
        if group is None:
            return
        count = torch.full((1,), samples if speaks else 0.0, dtype=torch.double, device=device)
        self._sent_later = count if late else None
        self._answers = [] if late else [start_small_sum(count, group, "number of samples")]

    def close(self, loss: Tensor) -> None:
        """Backward is over, and ``loss`` the mean over this rank's batch, as far as it knows it."""
        self.local = loss.detach()
        if self._group is None:
            return
        weight = (1.0 if self._sum else self._own) if self._own else 0.0
        mine = self.local.double() * weight if weight else torch.zeros_like(self.local, dtype=torch.double)
        known = mine.reshape(1)
        if self._sent_later is not None:
            known = torch.cat([self._sent_later, known])
        self._answers.append(start_small_sum(known, self._group, "loss"))

    @property
    def loss(self) -> Tensor:
        if self._alone:
            return self.local
        total = self._received(1)
        return (total if self._sum else total / self.samples).to(self.local.dtype)

    @property
    def samples(self) -> Tensor | float:
        if self._alone:
            return self._own
        count = self._received(0)
        return count if count.is_cuda else float(count)

    def _received(self, place: int) -> Tensor:
        while len(self._sums) <= place:
            self._sums += self._answers.pop(0)()
        return self._sums[place]
