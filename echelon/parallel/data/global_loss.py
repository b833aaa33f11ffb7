"""Global sample count and global mean loss of a step, from one small all-reduce.

The message is sent before backward and read when the first bucket needs the divisor, so its latency is hidden. On a
CPU, where a message costs more than its latency, the numbers piggyback on the last bucket of gradients.
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

#: A piggybacked count is sent as quotient and remainder by this number, so that it stays exact in single precision.
PACK = 4096.0


#: Sums over all ranks: losses times their counts, counts, rows, and the two extra numbers.
Sums = Sequence[Tensor] | Sequence[float]
#: Further numbers that the message carries, whole numbers of at least 0: the first one at most the number of ranks.
Extras = tuple[float, float]
NO_EXTRAS: Extras = (0.0, 0.0)


class PiggybackSum(Protocol):
    """A reducer that can sum a few more numbers over the same ranks in one of its own messages, after backward."""

    def piggyback(self, numbers: Sequence[float]) -> Callable[[], list[float]]: ...


class GlobalLoss:
    """The global sample count and loss of one forward pass. ``group=None``: this process is the whole job.

    count:  number of items that this rank's loss averages over: rows, or targets that are not ignored
    rows:   samples in this rank's batch
    is_sum: True if losses of ranks are added, not averaged
    ride:   reducer to piggyback on instead of a separate message; the sums are then known only after the reduction
    extras: numbers of this rank to sum along; default zeros
    """

    def __init__(
        self,
        loss: Tensor,
        count: Count,
        rows: float,
        is_sum: bool,
        group: dist.ProcessGroup | None,
        ride: PiggybackSum | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        self._extras = extras
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
            contribution = self.local.item() * (1.0 if is_sum else count) if count else 0.0
            few, many = extras
            packed = (contribution, count // PACK, count % PACK, rows // PACK, rows % PACK)
            self._answer = _unpacked(ride.piggyback((*packed, few, many // PACK, many % PACK)))
            return
        own = times_count(self.local.double(), count if not is_sum else float(rows > 0))
        answer = start_small_sum(_as_double([own, count, rows, *extras], loss.device), group, "loss and samples")
        self._answer = lambda: answer().unbind()

    @property
    def loss(self) -> Tensor:
        """Mean loss over all samples of all ranks; with ``is_sum``, the sum of the ranks' losses."""
        if self._loss is None:
            self._loss = self._mean(self._received())
        return self._loss

    @property
    def total(self) -> Tensor | float:
        """Sum of all ranks' losses, each times its count."""
        if self._alone:
            return self.local if self.is_sum else times_count(self.local, self.count)
        return self._received()[0]

    def _mean(self, sums: Sums) -> Tensor:
        total, count = sums[0], sums[1]
        if isinstance(total, Tensor):
            return (total if self.is_sum else total / count).to(self.local.dtype)
        mean = total if self.is_sum else total / float(count) if count else math.nan
        return torch.scalar_tensor(mean, dtype=self.local.dtype)

    @property
    def samples(self) -> Tensor | float:
        """Samples of all ranks: a number on the CPU, a tensor on a GPU (reading it there would stall the step)."""
        return self.count if self._alone else _readable(self._received()[1])

    @property
    def expected(self) -> tuple[Tensor | float, Tensor | float]:
        """Samples and rows of all ranks; reading this waits for the message."""
        return self.samples, self.rows

    @property
    def rows(self) -> Tensor | float:
        """Rows of all ranks' batches."""
        return self._rows if self._alone else _readable(self._received()[2])

    @property
    def extras(self) -> tuple[Tensor | float, Tensor | float]:
        """The extra numbers, summed over all ranks."""
        if self._alone:
            return self._extras
        few, many = self._received()[3:]
        return _readable(few), _readable(many)

    def _received(self) -> Sums:
        if self._total is None:
            self._total = self._answer()
        return self._total


def _unpacked(sums: Callable[[], list[float]]) -> Callable[[], Sums]:
    def answer() -> Sums:
        loss, packs, rest, row_packs, rows, few, many_packs, many = sums()
        return loss, packs * PACK + rest, row_packs * PACK + rows, few, many_packs * PACK + many

    return answer


def _as_double(counts: Sequence[Count], device: torch.device) -> Tensor:
    """Return the counts as one tensor, without waiting for counts that a device still computes."""
    known = [0.0 if isinstance(count, Tensor) else count for count in counts]
    together = torch.tensor(known, dtype=torch.double, device=device)
    for place, count in enumerate(counts):
        if isinstance(count, Tensor):
            together[place] = count
    return together


def _readable(count: Tensor | float) -> Tensor | float:
    return count if isinstance(count, Tensor) and count.is_cuda else float(count)


@dataclass(frozen=True)
class PipelineLocalLoss:
    """One rank's part of a pipeline's loss.

    total:     sum of the micro-batches' losses, each times its count; zero before the last stage
    count:     sum of the micro-batches' counts
    rows:      samples in the batch
    auxiliary: mean of the auxiliary losses of this rank's modules
    is_sum:    True if losses of replicas are added
    """

    total: Tensor
    count: Count
    rows: float
    auxiliary: Tensor
    is_sum: bool


class PipelineGlobalLoss:
    """The global sample count and loss of a pipeline, known only to its last stage and only after backward.

    expected:    expected count of this rank's loss; with ``ahead`` it is summed over ranks before backward
    rides:       always False, because several ranks work on one batch
    contributes: True if this rank contributes the counts; other ranks with the same batch contribute zero
    ahead:       True if backward needs the expected count of all ranks
    extras:      numbers of this rank to sum along; default zeros
    """

    rides = False

    def __init__(
        self,
        expected: float,
        rows: float,
        contributes: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
        ahead: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        self._extras = extras
        self.count: Count = expected
        self.is_sum = False
        self.local = torch.zeros((), device=device)
        self._group, self._contributes, self._device = group, contributes, device
        self._rows = rows if contributes else 0.0
        self._sums: Tensor | None = None
        self._expected: Callable[[], Tensor] | None = None
        if group is not None and ahead:
            self._expected = start_small_sum(
                _as_double([expected if contributes else 0.0, self._rows], device), group, "number of samples"
            )
        self._answer: Callable[[], Tensor] | None = None

    @property
    def expected(self) -> tuple[Tensor | float, Tensor | float]:
        """Expected count and rows of all ranks."""
        if self._group is None:
            return self.count, self._rows
        assert self._expected is not None
        count, rows = self._expected()
        return _readable(count), _readable(rows)

    def close(self, result: PipelineLocalLoss) -> None:
        """Record this rank's part of the loss after backward, and start the sum over ranks."""
        self.count, self.is_sum = result.count, result.is_sum
        is_mean = not self.is_sum and (isinstance(result.count, Tensor) or result.count)
        self.local = (result.total / result.count if is_mean else result.total) + result.auxiliary
        if self._group is None:
            return
        count = result.count if self._contributes else 0.0
        losses = [result.total, result.auxiliary * result.rows]
        known = _as_double([count, self._rows, self._rows * self.is_sum, *losses, *self._extras], self._device)
        self._answer = start_small_sum(known, self._group, "loss and samples")

    @property
    def loss(self) -> Tensor:
        if self._group is None:
            return self.local
        count, rows, summed, total, auxiliary = self._received()[:5]
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
    def extras(self) -> tuple[Tensor | float, Tensor | float]:
        """The extra numbers, summed over all ranks."""
        if self._group is None:
            return self._extras
        few, many = self._received()[5:]
        return _readable(few), _readable(many)

    @property
    def adds_up(self) -> bool:
        """True if the last stage of every replica has found the loss to be a sum over samples.

        Raises LossError if replicas disagree.
        """
        if self._group is None:
            return self.is_sum
        _, rows, summed, *_ = self._received().tolist()
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
