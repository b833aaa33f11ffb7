"""Answer: what a search has found. The best plans, their neighbours, and what else would help; or why none fits."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.draft import Draft
from echelon.plan.prediction import Prediction


@dataclass(frozen=True)
class PlanChoice:
    """A plan that fits, and what is foretold of it."""

    draft: Draft
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass(frozen=True)
class RejectedPlan:
    """One decision away from the best plan, and why it is not taken.

    reason:     ``all-reduce crosses hosts``, ``stage 0 needs 93 of 80 GB``
    what:       the decision: ``split 8``, ``no recompute``
    against:    seconds against the best plan's: 0.14 is 14% more; None where it does not fit
    """

    draft: Draft
    prediction: Prediction | None
    reason: str
    what: str = ""
    against: float | None = None

    def __str__(self) -> str:
        """``split 8: +14%, all-reduce crosses hosts``."""
        change = "" if self.against is None else f"{self.against:+.0%}"
        return f"{self.what}: {', '.join(word for word in (change, self.reason) if word)}"


@dataclass(frozen=True)
class HelpfulTechnique:
    """A means that was not allowed, and what it would bring: ``against`` -0.41 is 41% less time."""

    name: str
    draft: Draft
    prediction: Prediction
    against: float

    def __str__(self) -> str:
        return f"{self.name} would be {self.against:+.0%}: allow it with Auto(allow=('{self.name}',))"


@dataclass(frozen=True)
class NearestPlan:
    """Where nothing fits: the plan that lacks least.

    reason: which stage lacks how much, and what would do
    """

    draft: Draft
    prediction: Prediction
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """best:       plans that fit, the quickest first; empty where none does, and then there is ``nearest``
    rejected:   neighbours of the best
    considered: how many drafts were looked at
    seconds:    how long that took
    notes:      what a user should know of the choice, one line each: devices left idle
    """

    best: tuple[PlanChoice, ...]
    rejected: tuple[RejectedPlan, ...]
    considered: int
    seconds: float
    would_help: tuple[HelpfulTechnique, ...] = ()
    nearest: NearestPlan | None = None
    notes: tuple[str, ...] = ()
