"""Gantt charts of a step: measured if there is a timeline, predicted by the planner, or else simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import cast, get_args

from echelon.base import formatting
from echelon.base.errors import EchelonError
from echelon.observability.runlog.run_metadata import RunMetadata
from echelon.observability.trace.span import DEVICE, HOST, NETWORK, Span
from echelon.plan.schedule import Kind, make_schedule
from echelon.plan.simulate import simulate
from echelon.strategy.annotations.marks import ScheduleName
from echelon.tools.html.time_scale import TimeScale, make_time_scale, row_height
from echelon.tools.report.run_files import RunFiles

#: Largest number of ranks drawn.
MOST_RANKS = 64
#: Smallest width of a rectangle with a number in it, in percent of the chart's width.
ROOM_FOR_NUMBER = 2.2

#: Names of the actions of a schedule.
ACTIONS = {"F": "forward", "B": "backward", "I": "backward, for the input", "W": "backward, for the weights"}
#: Names of the span kinds of a timeline, in the order of the legend.
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "communicate": "communication",
    "wait": "waiting for others",
    "bubble": "bubble",
    "data": "waiting for data",
    "pull": "pulls from servers",
    "push": "pushes to servers",
    "other": "other",
}


@dataclass(frozen=True)
class GanttActivity:
    """One activity of a rank.

    number: micro-batch, as text; default ""
    thin:   True to draw it in the thin row below the rank's row, for messages that overlap computation; default False
    """

    rank: int
    kind: str
    begin: float
    end: float
    words: str
    number: str = ""
    thin: bool = False


@dataclass(frozen=True)
class GanttBlock:
    kind: str
    left: float
    width: float
    top: float
    height: float
    title: str
    number: str


@dataclass(frozen=True)
class Gantt:
    """A Gantt chart as geometry.

    origin:   measured, predicted or simulated
    rows:     (name, top, height)
    gap:      position of the omitted middle, in percent; None if nothing is omitted
    shown:    number of activities drawn
    events:   number of all activities
    left_out: number of ranks not shown
    """

    origin: str
    words: str
    rows: list[tuple[str, float, float]]
    blocks: list[GanttBlock]
    kinds: dict[str, str]
    ticks: list[tuple[float, str]]
    gap: float | None
    shown: int
    events: int
    height: float
    left_out: int


def gantts(gathered: RunFiles) -> list[Gantt]:
    """Return the measured and the predicted chart, as far as they exist, or else a simulated one."""
    facts = gathered.run.facts
    found = [_measured(gathered.spans), _predicted(facts) if facts else None]
    there = [each for each in found if each is not None]
    if not there and facts is not None and (made := _simulated(facts)) is not None:
        there.append(made)
    return there


# ---- measured ----


def _measured(spans: Mapping[int, Sequence[Span]]) -> Gantt | None:
    step = typical_step(spans[min(spans)]) if spans else None
    if step is None:
        return None
    doings = [doing for rank, of_rank in spans.items() for doing in _doings(rank, of_rank, step)]
    if not doings:
        return None
    first = min(doing.begin for doing in doings)
    moved = [replace(doing, begin=doing.begin - first, end=doing.end - first) for doing in doings]
    return draw(moved, KINDS, "measured", f"Step {step:,} as it was, all ranks on one clock.")


def typical_step(spans: Sequence[Span]) -> int | None:
    """Return the step of median duration; the first of several steps is not considered."""
    reach: dict[int, tuple[float, float]] = {}
    for span in spans:
        low, high = reach.get(span.step, (span.begin, span.end))
        reach[span.step] = min(low, span.begin), max(high, span.end)
    took = {step: reach[step][1] - reach[step][0] for step in sorted(reach)[1:] or sorted(reach)}
    return next((step for step in took if took[step] == median_low(took.values())), None)


def _doings(rank: int, spans: Sequence[Span], step: int) -> Iterator[GanttActivity]:
    of_step = [span for span in spans if span.step == step and span.kind in KINDS]
    works = any(span.lane == DEVICE and span.kind != "communicate" for span in of_step)
    main = DEVICE if works else HOST  # with a GPU, the host only launches the work
    staged = any("action" in span.more for span in of_step)
    for span in of_step:
        if staged and "phase" in span.more and span.kind in ("forward", "backward"):
            continue  # it covers the whole pipeline; the actions are drawn instead, with the bubble between them
        beside = span.lane == NETWORK or (span.lane == DEVICE and span.kind == "communicate")
        if beside or span.lane == main:
            micro = str(span.more.get("micro", "")) if "action" in span.more else ""
            yield GanttActivity(rank, span.kind, span.begin, span.end, _words(span), micro, beside)


def _words(span: Span) -> str:
    kind = KINDS[span.kind]
    said = kind if span.name in ("", kind, span.kind) else f"{kind}, {span.name}"
    return f"{said}, {formatting.size(span.bytes)}" if span.bytes else said


# ---- predicted and simulated ----


def _predicted(facts: RunMetadata) -> Gantt | None:
    events = facts.predicted.events if facts.predicted else ()
    doings = [
        _action(event.rank, event.kind, event.micro_batch, event.stage, event.begin, event.end)
        for event in events
        if event.kind in ACTIONS and 0 <= event.begin <= event.end < math.inf
    ]
    if not doings:
        return None
    return draw(doings, ACTIONS, "predicted", "As the planner expects it; rows are ranks along the stage axis.")


def _simulated(facts: RunMetadata) -> Gantt | None:
    """Simulate the schedule with backwards twice as long as forwards: the chart shows its shape, not its times."""
    schedule, stages = facts.schedule, len(facts.stages)
    if schedule is None or stages < 2 or schedule.name not in get_args(ScheduleName) or schedule.micro_batches > 4096:
        return None
    durations = {(kind, stage): seconds for stage in range(stages) for kind, seconds in _SECONDS.items()}
    name = cast(ScheduleName, schedule.name)
    try:
        made = make_schedule(name, stages, facts.mesh.get("stage", stages), schedule.micro_batches)
        timed = simulate(made, durations)
    except EchelonError:
        return None
    doings = [_action(event.rank, *event.action, event.begin, event.end) for event in timed.events]
    said = "The shape of the schedule if backward takes twice as long as forward; nothing here was measured."
    return draw(doings, ACTIONS, "simulated", said, timed=False)


_SECONDS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def _action(rank: int, kind: str, micro: int, stage: int, begin: float, end: float) -> GanttActivity:
    return GanttActivity(rank, kind, begin, end, f"{ACTIONS[kind]}, micro-batch {micro}, stage {stage}", str(micro))


# ---- rectangles ----


def draw(doings: Sequence[GanttActivity], kinds: dict[str, str], origin: str, words: str, timed: bool = True) -> Gantt:
    ranks = sorted({doing.rank for doing in doings})
    shown = set(ranks[:MOST_RANKS])
    doings = [doing for doing in doings if doing.rank in shown]
    rows, end = _rows(doings), max(doing.end for doing in doings)
    scale = make_time_scale([(doing.begin, doing.end) for doing in doings], max(end, 1e-9), len(rows))
    inside = [doing for doing in doings if scale.shows(doing.begin, doing.end)]
    inside.sort(key=lambda doing: (doing.begin, -doing.end))  # a nested activity is drawn over the outer one
    height = max(top + tall for top, tall in rows.values())
    return Gantt(
        origin,
        words,
        [(f"rank {rank}" if not thin else "", top, tall) for (rank, thin), (top, tall) in rows.items()],
        [_block(doing, scale, *rows[doing.rank, doing.thin], timed=timed) for doing in inside],
        {kind: text for kind, text in kinds.items() if any(doing.kind == kind for doing in doings)},
        scale.ticks() if timed else [],
        scale.gap,
        len(inside),
        len(doings),
        height,
        len(ranks[MOST_RANKS:]),
    )


def _rows(doings: Sequence[GanttActivity]) -> dict[tuple[int, bool], tuple[float, float]]:
    """Return a mapping from (rank, thin) to (top, height), in pixels."""
    keys = sorted({(doing.rank, False) for doing in doings} | {(doing.rank, doing.thin) for doing in doings})
    height, top = row_height(len({rank for rank, _ in keys})), 0.0
    found = {}
    for key in keys:
        tall = 0.4 * height if key[1] else height
        found[key] = (top, tall)
        top += tall
    return found


def _block(doing: GanttActivity, scale: TimeScale, top: float, height: float, timed: bool) -> GanttBlock:
    left, right = scale.at(doing.begin), scale.at(doing.end)
    times = f": {formatting.duration(doing.begin)} to {formatting.duration(doing.end)}" if timed else ""
    number = doing.number if right - left >= ROOM_FOR_NUMBER and height >= 14 else ""
    title = f"rank {doing.rank}, {doing.words}{times}"
    return GanttBlock(doing.kind, left, max(0.0, right - left), top + 1, height - 2, title, number)
