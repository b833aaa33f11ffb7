"""Report: all that ``echelon plan`` says of a choice, as data. The tables, the page and the JSON are three views of it.

The JSON has the names of the fields here; times are seconds, amounts are bytes, ratios are parts of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.base.config import build
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory, Prediction
from echelon.plan.schedule import Action
from echelon.plan.simulate import Event
from echelon.planner.plan_search.search_result import PlanChoice

VERSION = 1


@dataclass(frozen=True)
class ClusterFigure:
    """What the cluster's description says of one of its parts, and where that comes from."""

    of: str
    what: str
    value: float
    unit: str
    origin: str


@dataclass(frozen=True)
class ClusterSummary:
    """words: the cluster in a line."""

    name: str
    words: str
    devices: int
    figures: tuple[ClusterFigure, ...]


@dataclass(frozen=True)
class StageUnits:
    """What one stage has: units of the model, first to last, on which rank of the stage axis."""

    stage: int
    rank: int
    units: tuple[str, ...]
    recompute: bool


@dataclass(frozen=True)
class PlanAlternative:
    """Something else than the choice: another plan, or the best plan on another cluster.

    seconds: of a step then; None where it cannot be
    against: the same against the choice's: -0.09 is 9% less
    why:     what makes the difference
    plan:    the plan it would be, in words
    """

    what: str
    seconds: float | None
    against: float | None
    why: str = ""
    plan: str = ""


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan for another number of devices; None for seconds where none fits."""

    devices: int
    seconds: float | None
    plan: str


@dataclass(frozen=True)
class PlanReport:
    """options: the best plans, the choice first; empty where none fits, and then ``nearest`` is what lacks least
    asked:      the words of the command, from which the same can be made again
    neighbours: plans one decision away from the choice
    approximate: means that change the mathematics, and what they would bring
    sensitivities: the choice on another cluster
    notes:      what else a user should know of the choice, one line each
    sizes:      the time over the number of devices; empty where it was not asked for
    """

    model: str
    units: int
    weights: float
    batch: int
    machines: ClusterSummary
    asked: dict[str, Any]
    options: tuple[PlanChoice, ...]
    stages: tuple[StageUnits, ...] = ()
    neighbours: tuple[PlanAlternative, ...] = ()
    approximate: tuple[PlanAlternative, ...] = ()
    sensitivities: tuple[PlanAlternative, ...] = ()
    sizes: tuple[ScalingPoint, ...] = ()
    notes: tuple[str, ...] = ()
    considered: int = 0
    seconds: float = 0.0
    nearest: PlanChoice | None = None
    reason: str = ""

    @property
    def choice(self) -> PlanChoice:
        return self.options[0]

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **_data(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlanReport:
        nearest = data["nearest"]
        return cls(
            **{name: data[name] for name in ("model", "units", "weights", "batch", "asked", "considered", "seconds")},
            reason=data["reason"],
            notes=tuple(data["notes"]),
            machines=_machines(data["machines"]),
            options=tuple(map(_choice, data["options"])),
            stages=tuple(StageUnits(**{**stage, "units": tuple(stage["units"])}) for stage in data["stages"]),
            neighbours=tuple(PlanAlternative(**remark) for remark in data["neighbours"]),
            approximate=tuple(PlanAlternative(**remark) for remark in data["approximate"]),
            sensitivities=tuple(PlanAlternative(**remark) for remark in data["sensitivities"]),
            sizes=tuple(ScalingPoint(**size) for size in data["sizes"]),
            nearest=None if nearest is None else _choice(nearest),
        )


def samples_per_second(choice: PlanChoice) -> float:
    return choice.draft.batch / choice.seconds


def _data(value: Any) -> Any:
    """What JSON can say. Figures that follow from others (a plan's words, a device's total) are written out too."""
    if isinstance(value, Event):
        return [value.rank, *value.action, value.begin, value.end]
    if isinstance(value, PlanChoice):
        added = {"words": str(value.draft), "samples_per_second": samples_per_second(value)}
        return {**added, **_fields(value)}
    if isinstance(value, PredictedMemory):
        return {**_fields(value), "total": value.total}
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {name: _data(entry) for name, entry in value.items()}
    return [_data(entry) for entry in value] if isinstance(value, list | tuple) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _data(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _machines(data: Mapping[str, Any]) -> ClusterSummary:
    return ClusterSummary(**{**data, "figures": tuple(ClusterFigure(**figure) for figure in data["figures"])})


def _choice(data: Mapping[str, Any]) -> PlanChoice:
    return PlanChoice(draft_from(data["draft"]), _prediction(data["prediction"]))


def draft_from(data: Mapping[str, Any]) -> Draft:
    """A Draft from its fields as JSON has them."""
    return build(Draft, dict(data), "draft")


def _prediction(data: Mapping[str, Any]) -> Prediction:
    memory = [
        PredictedMemory(**{name: value for name, value in each.items() if name != "total"}) for each in data["memory"]
    ]
    events = (Event(rank, Action(kind, micro, stage), *times) for rank, kind, micro, stage, *times in data["events"])
    return Prediction(data["seconds"], dict(data["parts"]), tuple(memory), tuple(events))
