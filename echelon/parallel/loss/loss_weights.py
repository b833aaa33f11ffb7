"""Weights each loss by its count, so that the mean over all ranks equals the mean of one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.collectives import start_small_sum
from echelon.parallel.loss.loss_calls import SeenLoss
from echelon.parallel.loss.loss_reduction import Count, LossTerm, depends_on_shape, find_terms, read_count

if TYPE_CHECKING:
    from echelon.plan import Plan

_EARLY = 100  # first passes, in which all terms of a loss are inspected for something to announce
_CLOSE = 1e-6  # relative tolerance between two counts of one loss, one of which may be rounded


def weighs_losses(plan: Plan) -> bool:
    """Return True if an update combines several losses, of ranks, merged passes or micro-batches."""
    return plan.ranks > 1 or plan.gradient_merge > 1 or plan.pipeline is not None


def say_once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a version of ``say`` that drops repeated lines: training and evaluation see the same loss."""
    said: set[str] = set()

    def call(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return call


class LossWeights:
    """Finds the count of every loss: rows, targets that are not ignored, the sum of a mask.

    op:        "auto", "mean" or "sum", the value of Strategy(reduction=Reduction(op=...)). A sum over samples is
               detected with "auto" only
    say:       callback for one line to the user
    announces: True (default) if the count is announced; False for warnings only
    can_add:   True (default) if losses of ranks can be added; parameter servers take means only
    is_global: returns True if this rank's loss is over the rows of all replicas (gather_batch); its count is then this
               rank's own rows
    """

    def __init__(
        self,
        op: str,
        say: Callable[[str], None],
        announces: bool = True,
        can_add: bool = True,
        is_global: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_global = is_global
        self.is_sum = op == "sum"  #: losses and gradients of replicas are added
        self.adds_passes = False  #: also those of merged passes and micro-batches, because the loss itself is a sum
        self._may_be_sum, self._can_add, self._say = op == "auto", can_add, say
        self._term: LossTerm | None = None
        self._by_rows = op == "sum"
        self._is_settled = False
        self._compares = False
        self._passes = 0
        self._last: Count = 1.0
        self._length: float | None = None  # number of entries of a row in the first pass
        self.is_by_shape = False  #: True if the count depends only on the shape of the batch
        self._has_announced, self._has_warned = not announces, False

    def count(self, loss: Tensor, rows: float) -> Count:
        """Return the count of ``loss``, by default the rows of its batch."""
        if self._by_rows or rows == 0 or self._is_global():
            return rows
        if loss.grad_fn is None and self.is_by_shape:
            return self._last  # a CUDA graph is replayed for batches of one shape only
        count = None if self._term is None else read_count(loss, self._term, rows)
        if count is None:
            return self._find(loss, rows)
        if not self._has_announced or self._compares:
            self._inspect(_means(_terms(loss, rows)), rows)
        return count

    def _find(self, loss: Tensor, rows: float) -> Count:
        terms = _terms(loss, rows)
        means = _means(terms)
        if not means:
            if {term.kind for term in terms} != {"sum"}:
                self._warn(_cannot_see(terms))
            elif self._may_be_sum and not self._is_settled:
                self._take_sum(terms)
            self._by_rows = self._is_settled = True
            return rows
        main = self._term = means[0]
        if len(means) < len(terms):
            self._warn(_partly_seen(main, [term for term in terms if term.kind != "mean"]))
        # Several terms are compared in every pass, because a later batch may have fewer targets for one of them.
        self._compares = len(means) > 1 and not isinstance(main.count, Tensor)
        self._last, self.is_by_shape, self._is_settled = main.count, depends_on_shape(main), True
        self._inspect(means, rows)
        return main.count

    def _inspect(self, means: Sequence[LossTerm], rows: float) -> None:
        """Report once what is unusual about these terms."""
        self._compare(means, rows)
        for term in means:
            if self._term is not None and (term.node, term.route) == (self._term.node, self._term.route):
                self._compare_lengths(term, rows)
                self._announce(term.count, term, rows)

    def _compare(self, terms: Sequence[LossTerm], rows: float) -> None:
        """Warn once if terms of one loss average over different parts of the batch."""
        if len(terms) < 2 or self._has_warned:
            return
        shares = [_share(term, rows) for term in terms]
        if any(abs(share - shares[0]) > _CLOSE * abs(shares[0]) for share in shares):
            self._compares = False
            self._warn(_different(terms))

    def _compare_lengths(self, term: LossTerm, rows: float) -> None:
        """Warn once if rows are longer or shorter than before and the mean goes over all of their entries."""
        if term.size is None or term.count != rows:
            return
        length, self._length = term.size / rows, self._length or term.size / rows
        if length != self._length:
            self._warn(_of_different_lengths(length, self._length))

    def agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Treat the loss as a sum only if every rank that has a loss does. All ranks of ``group`` call this once."""
        has_loss = self._is_settled or self.adds_passes
        votes = start_small_sum(
            torch.tensor([has_loss, self.adds_passes], dtype=torch.double, device=device), group, "kind of the loss"
        )().tolist()
        if 0 < votes[1] < votes[0]:
            self._warn(
                f"loss: {votes[1]:.0f} of {votes[0]:.0f} ranks take it for a sum over samples, the others for a mean; "
                'it is averaged by rows; say which it is: Reduction(op="mean") or Reduction(op="sum")'
            )
        self.is_sum = self.adds_passes = 0 < votes[1] == votes[0]
        self._by_rows, self._is_settled = self._by_rows or votes[1] > 0, True

    def _warn(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(line)

    def _take_sum(self, terms: Sequence[LossTerm]) -> None:
        if not self._can_add:
            self._warn(
                f"loss: a sum over samples ({_names(terms)}), of which parameter servers take the mean over workers; "
                "return the mean over samples, or scale the learning rate by the number of workers"
            )
            return
        self.is_sum = self.adds_passes = True
        self._say(
            f"loss: a sum over samples ({_names(terms)}): losses and gradients of replicas are added, not averaged; "
            'Reduction(op="mean") averages them'
        )

    def _announce(self, count: Count, term: LossTerm, rows: float) -> None:
        """Announce once if the count is not a number of rows."""
        if self._has_announced:
            return
        self._passes += 1
        if isinstance(count, Tensor) or self._passes == _EARLY:
            self._has_announced = True  # reading the count in every step would wait for the device
        count = float(count)
        of = term.total
        if count == of or (of is None and count % rows == 0):
            return
        self._has_announced = True
        shown = f"{count:,.0f}" if float(count).is_integer() else f"{count:.4g}"
        self._say(
            f"loss: a mean over {shown}{f' of {of:,.0f}' if of else ''} targets in this batch of {rows:,.0f} rows; "
            "every rank is weighted by the targets that count"
        )


class EvaluationWeights:
    """Finds the counts of losses in evaluation, where at most the loss itself has a graph.

    training: weights of the training losses, which detect sums in losses that the model computes itself
    """

    def __init__(
        self,
        op: str,
        say: Callable[[str], None],
        training: LossWeights,
        is_global: Callable[[], bool] = lambda: False,
    ) -> None:
        self._traced, self._training = LossWeights(op, say, announces=False), training
        self._is_global = is_global

    @property
    def is_sum(self) -> bool:
        """True if the loss is a sum over samples."""
        return self._traced.adds_passes or self._training.adds_passes

    def count(self, seen: SeenLoss | None, rows: float) -> Count:
        """Return the count of a loss in the mean over all batches."""
        if seen is None or rows == 0 or self.is_sum or self._is_global():
            return rows
        if seen.traced is not None:
            return self._traced.count(seen.traced, rows)
        counts = [call.targets for call in seen.calls if call.kind == "mean"]
        if not counts or len(counts) < len(seen.calls):
            return rows
        # On a GPU a comparison would wait for the device, so there only a single call is used.
        is_clear = len(counts) == 1 or (not isinstance(counts[0], Tensor) and len(set(counts)) == 1)
        return counts[0] if is_clear else rows


class Weigher(Protocol):
    """Turns counts into weights of losses, as shares of an update."""

    def weigh(self, count: Count) -> Count: ...

    def weigh_rows(self, rows: float) -> Count: ...

    def weigh_sum(self) -> float: ...


class MicroBatchWeights:
    """Weights of the micro-batches of one batch; each weight is known when the micro-batch's loss is.

    main:    function from a loss to the part of it that is counted
    rows:    rows of the whole batch; 0 for a stand-in batch, whose micro-batches have weight 0
    samples: count of the loss over the whole batch if the user gives it, else None
    """

    def __init__(
        self,
        weigher: Weigher,
        losses: LossWeights,
        main: Callable[[Tensor], Tensor],
        rows: float,
        samples: float | None,
    ) -> None:
        self._weigher, self._losses, self._main = weigher, losses, main
        self.rows, self._samples = rows, samples

    @property
    def is_sum(self) -> bool:
        return self._losses.is_sum

    def of_loss(self, loss: Tensor, rows: int, part: float) -> tuple[Count, Count]:
        """Return the factor of a micro-batch's loss for backward, and its count in the mean.

        rows: rows of the micro-batch
        part: share of the batch's rows
        """
        main = self._main(loss)
        if not part or not self.rows:
            return 0.0, 0.0
        if self._samples is not None:
            return self._weigher.weigh(self._samples * part), self._samples * part
        count = self._losses.count(main, float(rows))
        if self._losses.adds_passes:
            return self._weigher.weigh_sum(), 1.0
        if self._losses.is_sum:
            return self._weigher.weigh(1.0) * part, part
        return self._weigher.weigh(count), count

    def of_auxiliary(self, part: float) -> Count:
        """Return the factor of an auxiliary loss, which is a mean over rows."""
        return self._weigher.weigh_rows(self.rows) * part


def _terms(loss: Tensor, rows: float) -> list[LossTerm]:
    return [term for term in find_terms(loss, rows) if term.kind != "weights"]


def _means(terms: Sequence[LossTerm]) -> list[LossTerm]:
    """Return the means among the terms, those over targets first."""
    return sorted((term for term in terms if term.kind == "mean"), key=lambda term: term.total is None)


def _share(term: LossTerm, rows: float) -> float:
    """Return a mean's count in units of rows, so that means over rows and over entries can be compared."""
    count = float(term.count)
    if term.total:
        return rows * count / term.total
    return rows if count % rows == 0 else count


def _names(terms: Sequence[LossTerm]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"Backward\d*$", "", term.node) for term in terms))


_REMEDY = "give step(..., samples=...) the number it averages over, if that is not the number of rows"


def _cannot_see(terms: Sequence[LossTerm]) -> str:
    seen = f" ({_names(terms)})" if terms else ""
    return (
        f"loss: the number it averages over cannot be read{seen}; ranks and passes are weighted by rows, which "
        f"matches one process for a mean over rows; {_REMEDY}"
    )


def _partly_seen(main: LossTerm, others: Sequence[LossTerm]) -> str:
    return (
        f"loss: ranks and passes are weighted by the number that {_names([main])} averages over; the numbers of its "
        f"other terms ({_names(others)}) cannot be read, and these terms may differ from one process"
    )


def _of_different_lengths(now: float, before: float) -> str:
    return (
        f"loss: a mean over all entries of rows that have {now:,.0f} entries here and had {before:,.0f} before; it "
        "matches one process only where all ranks have rows of one length in a step: mask the padding, or pad all "
        "batches to one length"
    )


def _different(terms: Sequence[LossTerm]) -> str:
    return (
        f"loss: its terms ({_names(terms)}) average over different numbers of targets; ranks and passes are weighted "
        "by the first term's, and the others match one process only where every rank has equally many"
    )
