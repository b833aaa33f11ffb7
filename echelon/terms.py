"""What ``distribute()`` goes by."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from echelon.annotation import Marks
from echelon.elastic import Elastic
from echelon.plan import Plan
from echelon.planner.run.saved import SavedPlan
from echelon.slices import Slices
from echelon.strategy import Strategy


class Terms(NamedTuple):
    """What was asked for, by the script and by the model's marks."""

    strategy: Strategy
    marks: Marks
    plan: Plan | SavedPlan | str | Path | None
    cluster: Slices | None
    elastic: Elastic | None
