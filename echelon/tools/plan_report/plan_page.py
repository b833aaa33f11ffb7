"""Render a PlanReport as one self-contained HTML page, without network access or scripts.

This module computes positions, and page.html.j2 draws. Horizontal positions are percentages of a figure's width (0 to
100), vertical positions are pixels: so the page fits a phone as well as a desktop without shrinking its text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.base import formatting
from echelon.plan.prediction import PredictedMemory
from echelon.plan.simulate import Event
from echelon.planner.plan_search.search_result import PlanChoice
from echelon.tools.html.bars import BarSegment, stacked
from echelon.tools.html.templates import templates
from echelon.tools.html.time_scale import TimeScale, make_time_scale, row_height
from echelon.tools.plan_report import plan_tables
from echelon.tools.plan_report.report_data import PlanAlternative, PlanReport, ScalingPoint, samples_per_second

#: Least width of a block, in percent of the figure's width, that shows its micro-batch number.
ROOM_FOR_NUMBER = 2.2

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, for the input",
    "W": "backward, for the weights",
}


def render(report: PlanReport) -> str:
    """Return the HTML of the page."""
    return templates(Path(__file__).parent).get_template("page.html.j2").render(**_view(report))


def _view(report: PlanReport) -> dict[str, Any]:
    view: dict[str, Any] = {"report": report, "headline": plan_tables.headline(report), "show": plan_tables}
    view["tables"] = {section.title: section for section in plan_tables.sections(report)}
    view["figures"] = plan_tables.figures(report.machines)
    if not report.options:
        return view
    choice = report.choice
    return view | {
        "choice": choice,
        "facts": _key_figures(report),
        "times": list(stacked([(part, seconds) for part, seconds, _ in plan_tables.time_parts(choice)])),
        "timeline": timeline(choice),
        "memory": memory_bars(choice.prediction.memory),
        "memory_table": plan_tables.memory(choice),
        "plans": plan_tables.plans(report),
        "contents": plan_tables.contents(report.stages),
        "bars": _change_bars(sensitivities=report.sensitivities, approximate=report.approximate),
        "line": line(report.sizes, report.machines.devices),
        "sizes": plan_tables.sizes(report.sizes, report.batch),
    }


def _key_figures(report: PlanReport) -> list[tuple[str, str, str]]:
    """Return the key figures at the top of the page as (label, figure, small print)."""
    choice = report.choice
    fullest, parts = choice.prediction.fullest, choice.prediction.parts
    computing = parts.get("compute", 0.0) / choice.seconds
    figures = [
        ("a step", formatting.duration(choice.seconds), f"batch {report.batch:,}"),
        ("samples a second", formatting.rate(samples_per_second(choice)), f"on {_used(report)}"),
        ("of a step computes", formatting.percent(computing), "on the busiest device"),
    ]
    if fullest.limit:
        figures.append(
            ("of memory used", formatting.percent(fullest.total / fullest.limit), plan_tables.of_limit(fullest))
        )
    return figures


def _used(report: PlanReport) -> str:
    """Return ``32 devices``, or ``16 of 24 devices`` if some stay idle."""
    used, there = report.choice.draft.ranks, report.machines.devices
    return f"{used:,}{f' of {there:,}' if used != there else ''} device{'s' if there > 1 else ''}"


# ---- bars ----


@dataclass(frozen=True)
class DeviceMemoryBar:
    """A device's memory as a bar. ``limit`` is the position of the limit line in percent; None if there is no limit."""

    rank: int
    memory: PredictedMemory
    bars: list[BarSegment]
    limit: float | None


def memory_bars(memories: Sequence[PredictedMemory]) -> list[DeviceMemoryBar]:
    """Return one bar per device, all on a scale that holds the largest total and the largest limit."""
    whole = 1.02 * max(max(each.total, each.limit) for each in memories)
    return [
        DeviceMemoryBar(
            rank,
            each,
            stacked([(name, getattr(each, name)) for name in plan_tables.HELD if getattr(each, name)], whole),
            100 * each.limit / whole if each.limit else None,
        )
        for rank, each in enumerate(memories)
    ]


@dataclass(frozen=True)
class ChangeBar:
    remark: PlanAlternative
    left: float
    width: float


def _change_bars(**figures: Sequence[PlanAlternative]) -> dict[str, list[ChangeBar]]:
    """Return the bars of each figure on one scale, so that bars of different figures can be compared."""
    there = {name: [each for each in remarks if each.against is not None] for name, remarks in figures.items()}
    most = max([abs(each.against or 0.0) for remarks in there.values() for each in remarks] + [0.05])
    return {name: change_bars(remarks, most) for name, remarks in there.items()}


def change_bars(remarks: Sequence[PlanAlternative], most: float) -> list[ChangeBar]:
    """Return one bar per alternative: left of the middle if it is faster, right of the middle if it is slower.

    most: change whose bar is half as wide as the figure
    """
    found = []
    for remark in remarks:
        width = 50 * abs(remark.against or 0.0) / most
        found.append(ChangeBar(remark, 50 - width if (remark.against or 0.0) < 0 else 50.0, width))
    return found


# ---- the schedule ----


@dataclass(frozen=True)
class TimelineBlock:
    event: Event
    chunk: int
    left: float
    width: float
    number: bool

    @property
    def title(self) -> str:
        kind, micro, stage = self.event.action
        times = f"{formatting.duration(self.event.begin)} to {formatting.duration(self.event.end)}"
        return f"{KINDS[kind]}, micro-batch {micro}, stage {stage}, rank {self.event.rank}: {times}"


@dataclass(frozen=True)
class TimelineFigure:
    """The pipeline schedule as a figure.

    rows:   number of ranks along the stage axis
    row:    height of one rank's row in pixels
    blocks: the actions that are shown
    kinds:  descriptions of the kinds of action that occur, for the legend
    ticks:  (position, time) labels of the time axis
    gap:    position at which the middle of the step is left out; None if all of it is shown
    shown:  number of events that are shown, of ``events`` in all
    rest:   position at which the rest of the step (all-reduce, update) begins, up to 100; None if there is no rest
    """

    rows: int
    row: float
    blocks: list[TimelineBlock]
    kinds: dict[str, str]
    ticks: list[tuple[float, str]]
    gap: float | None
    shown: int
    events: int
    rest: float | None

    @property
    def height(self) -> float:
        return self.rows * self.row


def timeline(choice: PlanChoice) -> TimelineFigure | None:
    """Return the pipeline's events as a figure; None if the prediction has no events."""
    events, whole = choice.prediction.events, choice.seconds
    if not events:
        return None
    end = max(event.end for event in events)
    whole = max(whole, end)
    rows = 1 + max(event.rank for event in events)
    scale = make_time_scale([(event.begin, event.end) for event in events], whole, rows)
    inside = [event for event in events if scale.shows(event.begin, event.end)]
    return TimelineFigure(
        rows,
        row_height(rows),
        [_block(event, scale, rows) for event in inside],
        {kind: text for kind, text in KINDS.items() if any(event.action.kind == kind for event in events)},
        scale.ticks(),
        scale.gap,
        len(inside),
        len(events),
        scale.at(end) if whole > 1.0001 * end else None,
    )


def _block(event: Event, scale: TimeScale, rows: int) -> TimelineBlock:
    left, right = scale.at(event.begin), scale.at(event.end)
    return TimelineBlock(
        event, event.action.stage // rows, left, max(0.0, right - left), right - left >= ROOM_FOR_NUMBER
    )


# ---- time over devices ----


@dataclass(frozen=True)
class ScalingChartPoint:
    """A point of the chart: ``x`` in percent, ``y`` in pixels; ``ideal`` is the y of perfect linear scaling."""

    size: ScalingPoint
    x: float
    y: float
    ideal: float
    chosen: bool

    @property
    def text(self) -> str:
        return formatting.duration(self.size.seconds or 0.0)


LINE_HEIGHT, LINE_MARGIN = 260.0, 34.0


def line(sizes: Sequence[ScalingPoint], devices: int) -> list[ScalingChartPoint]:
    """Return the points of the chart of time over devices; it is empty with fewer than two points.

    Both axes are logarithmic, so that perfect scaling is a straight line.
    """
    there = [size for size in sizes if size.seconds]
    if len(there) < 2:
        return []
    first = there[0]
    ideal = [_log(first.seconds) - _log(size.devices) + _log(first.devices) for size in there]
    real = [_log(size.seconds) for size in there]
    low, high = min(real + ideal), max(real + ideal)
    across = _log(there[-1].devices) - _log(first.devices)

    def height(value: float) -> float:
        return LINE_MARGIN + (LINE_HEIGHT - 2 * LINE_MARGIN) * (high - value) / max(high - low, 1e-9)

    return [
        ScalingChartPoint(
            size,
            8 + 84 * (_log(size.devices) - _log(first.devices)) / across,
            height(at),
            height(perfect),
            size.devices == devices,
        )
        for size, at, perfect in zip(there, real, ideal, strict=True)
    ]


def _log(value: float | None) -> float:
    assert value is not None
    return math.log2(value)
