"""The data that ``echelon plan`` reports; tables, HTML page and JSON are three views of a PlanReport.

The JSON uses the field names of these classes. Times are in seconds, amounts in bytes; a ratio of 1 means 100%.
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
    """One figure of a device or link of the cluster, and its origin (measured, default, ...)."""

    of: str
    what: str
    value: float
    unit: str
    origin: str


@dataclass(frozen=True)
class ClusterSummary:
    """The cluster's name, its description in one line (``words``), number of devices, and figures."""

    name: str
    words: str
    devices: int
    figures: tuple[ClusterFigure, ...]


@dataclass(frozen=True)
class StageUnits:
    """The units of one stage, first to last, and the rank along the stage axis that runs it."""

    stage: int
    rank: int
    units: tuple[str, ...]
    recompute: bool


@dataclass(frozen=True)
class PlanAlternative:
    """An alternative to the chosen plan: another plan, or the best plan on another cluster.

    seconds: seconds of a step of the alternative; None if it is not possible
    against: ``seconds`` relative to the chosen plan: -0.09 is 9% less
    why:     reason of the difference
    plan:    the alternative plan as text
    """

    what: str
    seconds: float | None
    against: float | None
    why: str = ""
    plan: str = ""


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan for another number of devices; ``seconds`` is None if no plan fits."""

    devices: int
    seconds: float | None
    plan: str


@dataclass(frozen=True)
class PlanReport:
    """All that ``echelon plan`` reports.

    asked:         options of the command, enough to make the same report again
    options:       the best plans, the chosen one first; empty if no plan fits
    neighbours:    plans that differ from the chosen one in one decision
    approximate:   techniques that change the numerics, and the time that they would save
    sensitivities: predictions with another network, memory, speed, number of devices or batch
    sizes:         time of a step by number of devices; empty if it was not requested
    notes:         further remarks on the choice, one line each
    considered:    number of drafts that the search looked at
    seconds:       seconds that the search took
    nearest:       the plan that exceeds its memory limit least; None if a plan fits
    reason:        reason why ``nearest`` does not fit
    runs_as:       precision and compilation of the plans: ``bf16, compiled blocks``
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
    runs_as: str = ""

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
            runs_as=data.get("runs_as", ""),
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
    """Convert a value to JSON types. Derived figures (a plan as text, a device's total bytes) are included."""
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
    """Return the Draft with these fields, given as JSON data."""
    return build(Draft, dict(data), "draft")


def _prediction(data: Mapping[str, Any]) -> Prediction:
    memory = [
        PredictedMemory(**{name: value for name, value in each.items() if name != "total"}) for each in data["memory"]
    ]
    events = (Event(rank, Action(kind, micro, stage), *times) for rank, kind, micro, stage, *times in data["events"])
    return Prediction(data["seconds"], dict(data["parts"]), tuple(memory), tuple(events))
