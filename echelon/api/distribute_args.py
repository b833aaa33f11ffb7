"""The arguments of ``distribute()`` that determine the plan."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from echelon.engine.elastic import Elastic
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan
from echelon.strategy import Strategy
from echelon.strategy.annotations.annotate import ModelMarks
from echelon.strategy.annotations.slices import Slices


class DistributeArgs(NamedTuple):
    """The options from the script and the marks of the model."""

    strategy: Strategy
    marks: ModelMarks
    plan: Plan | SavedPlan | str | Path | None
    cluster: Slices | None
    elastic: Elastic | None
