"""What ``distribute()`` goes by."""

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
    """What was asked for, by the script and by the model's marks."""

    strategy: Strategy
    marks: ModelMarks
    plan: Plan | SavedPlan | str | Path | None
    cluster: Slices | None
    elastic: Elastic | None
