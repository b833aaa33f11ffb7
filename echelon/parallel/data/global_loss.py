"""One small message a step: how many samples did all ranks see, and what was the mean loss over them?

It leaves before backward and is read when the first bucket needs the divisor, so its latency hides. On a CPU, where a
message costs more than its latency, it rides with the last bucket of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import LossError
from echelon.distributed.collectives import start_small_sum
from echelon.parallel.loss.loss_reduction import Count, times_count

#: A count travels as two numbers, so that it stays exact among single precision's: how many of so many, and the rest.
PACK = 4096.0


#: Of all ranks: losses times what they count for, what they count for, and rows.
Sums = tuple[Tensor, Tensor, Tensor] | tuple[float, float, float]


class PiggybackSum(Protocol):
    """What sums some numbers over the same ranks anyhow, after backward."""

    def piggyback(self, numbers: Sequence[float]) -> Callable[[], list[float]]: ...


class GlobalLoss:
    """The global sample count and loss of one forward pass. ``group=None``: this process is the whole job.

    count:  what this rank's loss averages over: rows, or targets that count
    rows:   samples in its batch
    is_sum: losses of ranks are added, not averaged
    ride:   in place of a message of its own; then nothing is known before gradients are reduced
    """

    def __init__(
        self,
        loss: Tensor,
        count: Count,
        rows: float,
        is_sum: bool,
        group: dist.ProcessGroup | None,
        ride: PiggybackSum | None = None,
    ) -> None:
        self.local = loss.detach()  #: this rank's own mean loss
        self.count, self.is_sum = count, is_sum
        self._alone, self._rows = group is None, rows
        self.rides = ride is not None
        self._total: Sums | None = None
        self._loss = self.local if group is None else None
        if group is None:
            return
        self._answer: Callable[[], Sums]
        if ride is not None and not isinstance(count, Tensor):
            mine = self.local.item() * (1.0 if is_sum else count) if count else 0.0
            packed = (mine, count // PACK, count % PACK, rows // PACK, rows % PACK)
            self._answer = _unpacked(ride.piggyback(packed))
            return
        own = times_count(self.local.double(), count if not is_sum else float(rows > 0))
        answer = start_small_sum(_as_double([own, count, rows], loss.device), group, "loss and samples")
        self._answer = lambda: _triple(answer())

    @property
    def loss(self) -> Tensor:
        """Mean loss over all samples of all ranks (sum over ranks of their losses, with ``is_sum``)."""
        if self._loss is None:
            self._loss = self._mean(self._received())
        return self._loss

    @property
    def total(self) -> Tensor | float:
        """Sum of all ranks' losses, each times what it counts for."""
        if self._alone:
            return self.local if self.is_sum else times_count(self.local, self.count)
        return self._received()[0]

    def _mean(self, sums: Sums) -> Tensor:
        total, count, _ = sums
        if isinstance(total, Tensor):
            return (total if self.is_sum else total / count).to(self.local.dtype)
        mean = total if self.is_sum else total / float(count) if count else math.nan
        return torch.scalar_tensor(mean, dtype=self.local.dtype)

    @property
    def samples(self) -> Tensor | float:
        """Samples over all ranks: a number on the CPU, a tensor on a GPU (reading it there would stall the step)."""
        return self.count if self._alone else _readable(self._received()[1])

    @property
    def expected(self) -> tuple[Tensor | float, Tensor | float]:
        """Samples and rows of all ranks, waited for."""
        return self.samples, self.rows

    @property
    def rows(self) -> Tensor | float:
        """Rows of all ranks' batches."""
        return self._rows if self._alone else _readable(self._received()[2])

    def _received(self) -> Sums:
        if self._total is None:
            self._total = self._answer()
        return self._total


def _triple(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return sums[0], sums[1], sums[2]


def _unpacked(sums: Callable[[], list[float]]) -> Callable[[], tuple[float, float, float]]:
    def answer() -> tuple[float, float, float]:
        loss, packs, rest, row_packs, rows = sums()
        return loss, packs * PACK + rest, row_packs * PACK + rows

    return answer


def _as_double(counts: Sequence[Count], device: torch.device) -> Tensor:
    """Return counts side by side, without waiting for those that a device still computes."""
    if not any(isinstance(count, Tensor) for count in counts):
        return torch.tensor(counts, dtype=torch.double, device=device)
    return torch.stack([torch.as_tensor(count, dtype=torch.double, device=device) for count in counts])


def _readable(count: Tensor | float) -> Tensor | float:
    return count if isinstance(count, Tensor) and count.is_cuda else float(count)


@dataclass(frozen=True)
class PipelineLocalLoss:
    """One rank's part of a pipeline's loss.

    total:     sum of the micro-batches' losses, each times what it counts for; zero before the last stage
    count:     what they count for together
    rows:      samples in the batch
    auxiliary: mean of the auxiliary losses of this rank's modules
    is_sum:    losses of replicas are added
    """

    total: Tensor
    count: Count
    rows: float
    auxiliary: Tensor
    is_sum: bool


class PipelineGlobalLoss:
    """The same for a pipeline, whose loss only its last stage knows, and only at the end.

    expected: what this rank's loss is likely to average over; all ranks are told of it ahead where that is asked for
    rides:    never: several ranks know of one batch
    speaks:   this rank counts, others that work on the same batch only listen
    ahead:    backward has to know how many samples all ranks expect
    """

    rides = False

    def __init__(
        self,
        expected: float,
        rows: float,
        speaks: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
        ahead: bool = False,
    ) -> None:
        self.count: Count = expected
        self.is_sum = False
        self.local = torch.zeros((), device=device)
        self._group, self._speaks, self._device = group, speaks, device
        self._rows = rows if speaks else 0.0
        self._sums: Tensor | None = None
        self._expected: Callable[[], Tensor] | None = None
        if group is not None and ahead:
            self._expected = start_small_sum(
                _as_double([expected if speaks else 0.0, self._rows], device), group, "number of samples"
            )
        self._answer: Callable[[], Tensor] | None = None

    @property
    def expected(self) -> tuple[Tensor | float, Tensor | float]:
        """What all ranks expect to count, and their rows."""
        if self._group is None:
            return self.count, self._rows
        assert self._expected is not None
        count, rows = self._expected()
        return _readable(count), _readable(rows)

    def close(self, result: PipelineLocalLoss) -> None:
        """Take what this rank knows of the loss when backward is over."""
        self.count, self.is_sum = result.count, result.is_sum
        is_mean = not self.is_sum and (isinstance(result.count, Tensor) or result.count)
        self.local = (result.total / result.count if is_mean else result.total) + result.auxiliary
        if self._group is None:
            return
        count = result.count if self._speaks else 0.0
        losses = [result.total, result.auxiliary * result.rows]
        known = _as_double([count, self._rows, self._rows * self.is_sum, *losses], self._device)
        self._answer = start_small_sum(known, self._group, "loss and samples")

    @property
    def loss(self) -> Tensor:
        if self._group is None:
            return self.local
        count, rows, summed, total, auxiliary = self._received()
        mean: Tensor = torch.where(summed > 0, total, total / count) + auxiliary / rows
        return mean.to(self.local.dtype)

    @property
    def total(self) -> Tensor | float:
        summed = self.is_sum if self._group is None else self._received()[2] > 0
        if isinstance(summed, Tensor):
            return torch.where(summed, self.loss, self.loss * self.samples)
        return self.loss if summed else times_count(self.loss, self.samples)

    @property
    def samples(self) -> Tensor | float:
        return self.count if self._group is None else _readable(self._received()[0])

    @property
    def rows(self) -> Tensor | float:
        return self._rows if self._group is None else _readable(self._received()[1])

    @property
    def adds_up(self) -> bool:
        """Return True if the last stage has found the loss to be a sum over samples, in every replica."""
        if self._group is None:
            return self.is_sum
        _, rows, summed, _, _ = self._received().tolist()
        if 0 < summed < rows:
            raise LossError(
                f"the loss looks like a sum over samples for {summed:.0f} of {rows:.0f} rows, and like a mean for the "
                'others; say which it is: Strategy(reduction=Reduction(op="mean")) or op="sum"'
            )
        return bool(summed > 0)

    def _received(self) -> Tensor:
        if self._sums is None:
            assert self._answer is not None
            self._sums = self._answer()
        return self._sums
