"""Section that compares ranks: own work, communication and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from echelon.base import formatting
from echelon.observability.runlog.run_reader import RankStepRecord, Run
from echelon.tools.html.bars import BarSegment, stacked
from echelon.tools.report.figures.curves import Chart, Series, chart
from echelon.tools.report.sections.html_table import HtmlTable
from echelon.tools.report.sections.phases import median_phases, own_work

#: A rank stands out if its own work takes longer than the median of the others by this fraction.
OUT = 0.05
#: Largest number of lines in a chart, and of bars and table rows.
MOST_LINES, MOST_BARS = 8, 64


@dataclass(frozen=True)
class RankTiming:
    """The median times of one rank, in milliseconds per step.

    own:         step without communication
    communicate: messages that computing does not hide, and waits
    peak:        peak memory in bytes
    """

    rank: int
    host: str
    own: float
    communicate: float
    peak: int
    bars: list[BarSegment]


@dataclass(frozen=True)
class RankSection:
    ranks: list[RankTiming]
    verdict: str
    table: HtmlTable
    left_out: int
    charts: list[Chart]


def ranks(run: Run) -> RankSection | None:
    there = _present(run)
    if not there:
        return None
    phases = {rank: median_phases([each.phases for each in steps]) for rank, steps in there.items()}
    widest = max(sum(each.values()) for each in phases.values())
    hosts = {each.rank: each.host for each in run.facts.ranks} if run.facts else {}
    found = [
        RankTiming(
            rank,
            hosts.get(rank, ""),
            own_work(phases[rank]),
            phases[rank].get("communicate", 0.0),
            max((each.peak or each.memory or 0 for each in steps), default=0),
            stacked(list(phases[rank].items()), widest or 1.0),
        )
        for rank, steps in there.items()
    ]
    slowest = slowest_of(found)
    shown = _shown(found, slowest)
    return RankSection(shown, verdict(found, slowest), _table(shown, slowest), len(found) - len(shown), _charts(there))


def _present(run: Run) -> dict[int, Sequence[RankStepRecord]]:
    """Return the records of the current ranks since the last start.

    A resumed run may have fewer or other ranks. If a rank has no record yet since the start, older records are used.
    """
    there: dict[int, Sequence[RankStepRecord]] = {rank: steps for rank, steps in run.ranks.items() if steps}
    if run.facts is None or not run.facts.world.size:
        return there
    now = {rank: steps for rank, steps in there.items() if rank < run.facts.world.size}
    since = run.facts.started
    newest: dict[int, Sequence[RankStepRecord]] = {
        rank: [step for step in steps if (step.time or 0.0) >= since] for rank, steps in now.items()
    }
    return newest if newest and all(newest.values()) else now


def slowest_of(found: Sequence[RankTiming]) -> RankTiming | None:
    """Return the rank whose own work takes longest; None for a single rank.

    The rank that communicates longest is rarely the slow one: it waits.
    """
    return max(found, key=lambda each: (each.own, -each.rank)) if len(found) > 1 else None


def verdict(found: Sequence[RankTiming], slowest: RankTiming | None) -> str:
    if slowest is None:
        return "One rank: there is no other to compare it with."
    middle = median(each.own for each in found if each is not slowest)
    over = slowest.own / middle - 1 if middle > 0 else 0.0
    where = f" ({slowest.host})" if slowest.host else ""
    took = f"{formatting.duration(slowest.own / 1e3)} of its own work a step"
    if over < OUT:
        by = f"{formatting.percent(over)} over the others"
        return f"No rank stands out. Rank {slowest.rank}{where} has most, {took}, {by}."
    waits = max(each.communicate for each in found if each is not slowest)
    held = f"; others communicate up to {formatting.duration(waits / 1e3)}" if waits > 0 else ""
    return f"Rank {slowest.rank}{where} is the slowest: {took}, {formatting.percent(over)} over the others{held}."


def _shown(found: Sequence[RankTiming], slowest: RankTiming | None) -> list[RankTiming]:
    """Return the first ``MOST_BARS`` ranks, always including the slowest."""
    first = list(found[:MOST_BARS])
    return first if slowest is None or slowest in first else [*first[:-1], slowest]


def _table(found: Sequence[RankTiming], slowest: RankTiming | None) -> HtmlTable:
    rows = [
        (
            str(each.rank),
            each.host,
            formatting.duration(each.own / 1e3),
            formatting.duration(each.communicate / 1e3),
            formatting.size(each.peak) if each.peak else "",
        )
        for each in found
    ]
    head = ("rank", "host", "own work", "communicate", "memory at most")
    marked = next((place for place, each in enumerate(found) if each is slowest), None)
    return HtmlTable("Ranks: a step (median) and memory", head, rows, (0, 2, 3, 4), marked)


def _charts(there: Mapping[int, Sequence[RankStepRecord]]) -> list[Chart]:
    own = {  # without the first record, which includes the setup
        rank: [(float(each.step), own_work(each.phases)) for each in steps[1:] or steps]
        for rank, steps in there.items()
    }
    held = {
        rank: [(float(each.step), float(each.memory)) for each in steps if each.memory is not None]
        for rank, steps in there.items()
    }
    gigabytes = {rank: [(x, y / 1e9) for x, y in points] for rank, points in held.items()}
    busy = {
        rank: [(float(each.step), each.utilisation) for each in steps if each.utilisation is not None]
        for rank, steps in there.items()
    }
    found = [
        chart("rank-work", f"Own work of a step{most_of(own)}", "ms", lines(own, "rank"), zero=True),
        chart("rank-memory", f"Memory{most_of(gigabytes)}", "GB", lines(gigabytes, "rank"), zero=True),
        chart("rank-busy", f"GPU utilisation{most_of(busy)}", "%", lines(busy, "rank"), zero=True),
    ]
    return [each for each in found if each is not None]


def lines(points: Mapping[int, Sequence[tuple[float, float]]], what: str) -> list[Series]:
    """Return one series per rank or server; only the highest ones if there are more than ``MOST_LINES``."""
    there = {number: each for number, each in points.items() if each}
    highest = sorted(there, key=lambda number: (-fmean(y for _, y in there[number]), number))[:MOST_LINES]
    return [Series(f"{what} {number}", f"s-{place % 8}", there[number]) for place, number in enumerate(sorted(highest))]


def most_of(points: Mapping[int, object]) -> str:
    return f", the {MOST_LINES} highest of {len(points)}" if len(points) > MOST_LINES else ""
