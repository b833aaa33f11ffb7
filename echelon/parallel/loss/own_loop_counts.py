"""Finds the counts of the losses of a user-written training loop, from one update to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from echelon.parallel.loss.loss_reduction import Count, LossTerm, find_terms

#: Codes for the kind of a rank's loss: their sum over ranks shows if all ranks have the same kind.
MEAN_CODE, SUM_CODE, UNKNOWN_CODE = 1.0, 2.0**20, 2.0**40


@dataclass(frozen=True)
class OwnCount:
    """The common count of all losses of one update; 1 for a sum or an unknown loss."""

    kind: Literal["mean", "sum", "unknown"]
    count: Count

    @property
    def code(self) -> float:
        return {"mean": MEAN_CODE, "sum": SUM_CODE, "unknown": UNKNOWN_CODE}[self.kind]


UNKNOWN = OwnCount("unknown", 1.0)


class OwnLoopCounts:
    """The counts of the losses that were passed to ``backward`` since the last update."""

    def __init__(self, op: str, say: Callable[[str], None]) -> None:
        self._op, self._say = op, say
        self._counts: list[OwnCount] = []
        self._forms: dict[Hashable, bool] = {}  # by graph nodes of a loss on a GPU: True if its terms have equal counts

    def add(self, loss: Tensor) -> None:
        self._counts.append(self._count(loss))

    def clear(self) -> None:
        self._counts = []

    @property
    def known(self) -> OwnCount:
        """The common count of all losses; UNKNOWN if they differ."""
        if not self._counts:
            return UNKNOWN
        first = self._counts[0]
        if len(self._counts) == 1 or self._counts.count(first) == len(self._counts):
            return first
        if all(each.kind == "mean" for each in self._counts):
            self._say(
                "loss: the losses of one update average over different numbers of targets, so ranks are weighted "
                "equally; that matches one process only where ranks have equally many; engine.step() weights each "
                "loss"
            )
        return UNKNOWN

    def _count(self, loss: Tensor) -> OwnCount:
        terms = [term for term in find_terms(loss, None) if term.kind != "weights"]
        kinds = {term.kind for term in terms}
        if kinds == {"sum"} and self._op == "auto":
            return OwnCount("sum", 1.0)
        is_one_mean = kinds == {"mean"} and self._count_alike(terms)
        return OwnCount("mean", terms[0].count) if is_one_mean else UNKNOWN

    def _count_alike(self, terms: Sequence[LossTerm]) -> bool:
        """Return True if all terms average over the same number of targets, as the terms of label smoothing do.

        On a GPU the numbers are read only for the first loss with the same graph nodes, because reading them waits for
        the device.
        """
        if len(terms) == 1:
            return True
        if not any(isinstance(term.count, Tensor) for term in terms):
            return len({term.count for term in terms}) == 1
        form = tuple((term.node, term.route) for term in terms)
        if form not in self._forms:
            self._forms[form] = len({float(term.count) for term in terms}) == 1
        return self._forms[form]
