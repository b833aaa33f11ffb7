"""Result of a search: the best plans, their neighbors and techniques that would help, or the reason why none fits."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.draft import Draft
from echelon.plan.prediction import Prediction

TIE = 0.02  # fraction of a step's time below which two plans count as equally fast: the accuracy of predictions


@dataclass(frozen=True)
class PlanChoice:
    """A plan and its prediction."""

    draft: Draft
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass(frozen=True)
class RejectedPlan:
    """A plan that differs from the best one in one decision, and the reason why it is worse.

    reason:     ``all-reduce crosses hosts``, ``stage 0 needs 93 of 80 GB``
    what:       the decision: ``split 8``, ``no recompute``
    against:    relative difference to the best plan's seconds: 0.14 is 14% more; None if the plan does not fit
    """

    draft: Draft
    prediction: Prediction | None
    reason: str
    what: str = ""
    against: float | None = None

    def __str__(self) -> str:
        """Return a line such as ``split 8: +14%, all-reduce crosses hosts``."""
        change = "" if self.against is None else f"{self.against:+.0%}"
        return f"{self.what}: {', '.join(word for word in (change, self.reason) if word)}"


@dataclass(frozen=True)
class HelpfulTechnique:
    """A technique that was not allowed, and its effect: ``against`` of -0.41 is 41% less time."""

    name: str
    draft: Draft
    prediction: Prediction
    against: float

    def __str__(self) -> str:
        return f"{self.name} would be {self.against:+.0%}: allow it with Auto(allow=('{self.name}',))"


@dataclass(frozen=True)
class NearestPlan:
    """The plan that exceeds its memory least, if no plan fits.

    reason: text with the stage, its memory and limit, and the hardware that would suffice
    """

    draft: Draft
    prediction: Prediction
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    best:       plans that fit, the fastest first; empty if none fits, then ``nearest`` is set
    rejected:   neighbors of the best plan
    considered: number of drafts that were predicted
    seconds:    duration of the search
    would_help: techniques that were not allowed and would make the best plan faster
    as_quick:   plans that would take less time than the best, by less than predictions can tell, and are less simple
    notes:      remarks for the user, one line each, such as idle devices
    """

    best: tuple[PlanChoice, ...]
    rejected: tuple[RejectedPlan, ...]
    considered: int
    seconds: float
    would_help: tuple[HelpfulTechnique, ...] = ()
    nearest: NearestPlan | None = None
    notes: tuple[str, ...] = ()
    as_quick: tuple[PlanChoice, ...] = ()
