"""Techniques that would make the best plan faster, if they were allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from echelon.plan.draft import Draft
from echelon.planner.plan_search.plan_shapes import APPROXIMATE, amp_of, combines
from echelon.planner.plan_search.search_result import TIE, HelpfulTechnique, PlanChoice

if TYPE_CHECKING:
    from echelon.planner.plan_search.search import PlanSearch


def would_help(search: PlanSearch, best: PlanChoice) -> Iterator[HelpfulTechnique]:
    """Yield the techniques that were not allowed and would make the best plan faster."""
    for name in APPROXIMATE:
        draft = None if name in search.allow else _with(search, best.draft, name)
        if draft is None or draft == best.draft:
            continue
        choice = search.exactly(search.builder.predicted(draft))
        change = choice.seconds / best.seconds - 1
        if choice.prediction.fits and change < -TIE:
            yield HelpfulTechnique(name, draft, choice.prediction, change)


def _with(search: PlanSearch, draft: Draft, name: str) -> Draft | None:
    """Return the plan with this technique added, or None if they cannot be combined."""
    if name == "amp":
        return None if draft.amp else draft.replaced(amp=amp_of(search.cluster))
    if draft.replicate == 1 or draft.comm_dtype or draft.approximate:
        return None
    change = {"fp16_allreduce": {"comm_dtype": "fp16"}}.get(name, {"approximate": name})
    marked = draft.stage > 1 or draft.split > 1 or draft.micro_batches > 1
    if not combines(marked, 0, change.get("comm_dtype"), change.get("approximate"), search.optimizer):
        return None
    return draft.replaced(shard=0, **change)
