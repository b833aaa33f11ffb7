"""Construction of a SavedPlan from a draft and the profile of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from echelon.base.version import __version__
from echelon.plan.draft import Draft
from echelon.plan.prediction import Prediction
from echelon.plan.saved_plan import SavedPlan, SavedPrediction, shapes_of
from echelon.planner.profiling.profile import Profile

if TYPE_CHECKING:
    from torch import nn


def make_saved_plan(
    draft: Draft,
    profile: Profile,
    *,
    model: nn.Module | None = None,
    cluster: str = "",
    prediction: Prediction | None = None,
    made_from: dict[str, Any] | None = None,
) -> SavedPlan:
    """Return a SavedPlan of ``draft`` with the units and splits of ``profile``.

    model:     model whose parameter shapes are stored and checked when the plan is run; default: none
    made_from: description of the inputs of the search, stored in the plan
    """
    return SavedPlan(
        draft=draft,
        units=_units_of(profile),
        splits=dict(profile.split_marks),
        model={} if model is None else shapes_of(model),
        name=profile.name,
        cluster=cluster,
        predicted=None if prediction is None else SavedPrediction.of(prediction, _flops(profile, draft)),
        created_by=f"echelon {__version__}",
        made_from=made_from or {},
    )


def _flops(profile: Profile, draft: Draft) -> float:
    samples = max(1, round(draft.micro_batch))
    units = profile.sheet(samples, 1, draft.amp).units
    return sum(unit.forward.flops + unit.backward.flops for unit in units) * draft.batch / samples


def _units_of(profile: Profile) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules of every unit; a unit has several modules if they must be in one stage."""
    members: Sequence[Sequence[str]] = getattr(profile, "members", None) or [(name,) for name in profile.names]
    return tuple(map(tuple, members))
