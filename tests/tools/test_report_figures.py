"""The report's pictures as geometry: every point is where it belongs, and no spike is lost."""

from __future__ import annotations

import math
import random
import re

import pytest

from echelon.observability.runlog.run_metadata import RunMetadata
from echelon.observability.trace.span import Span
from echelon.plan.schedule import make_schedule
from echelon.plan.simulate import simulate
from echelon.tools.report.figures.curves import (
    HEIGHT,
    MARGIN,
    SIDE,
    WIDTH,
    Point,
    Scale,
    Series,
    chart,
    is_spiky,
    scale_for,
    thin,
)
from echelon.tools.report.figures.gantt import ACTIONS, MOST_RANKS, GanttActivity, draw, typical_step
from echelon.tools.report.figures.placement_figure import placement

random.seed(5)


def places(path: str) -> list[tuple[float, float]]:
    """The points of a path, each once: a stroke begins with its first point twice."""
    found = [(command, float(x), float(y)) for command, x, y in re.findall(r"([ML])(\S+) ([^ML]+)", path)]
    return [(x, y) for place, (_, x, y) in enumerate(found) if place == 0 or found[place - 1][0] != "M"]


def test_few_points_stay_as_they_are() -> None:
    points: list[Point] = [(float(x), float(x * x)) for x in range(2000)]
    assert thin(points) == points


@pytest.mark.parametrize("count", [2001, 5000, 123_457])
def test_of_many_points_every_spike_is_kept(count: int) -> None:
    points: list[Point] = [(float(x), math.sin(x / 500)) for x in range(count)]
    spikes = random.sample(range(10, count - 10), 7)
    for place, at in enumerate(spikes):
        points[at] = (float(at), 50.0 + place if place % 2 else -50.0 - place)
    found = thin(points)
    assert len(found) <= 2000
    assert {points[at] for at in spikes} <= set(found)
    assert found[0] == points[0]
    assert found[-1] == points[-1]
    assert [x for x, _ in found] == sorted({x for x, _ in found})
    highest = max(y for _, y in points if y is not None)
    assert max(y for _, y in found if y is not None) == highest


def test_one_nan_among_many_points_stays_a_gap() -> None:
    points: list[Point] = [(float(x), 1.0 + x % 7) for x in range(50_000)]
    points[31_234] = (31_234.0, None)
    found = thin(points)
    assert len(found) <= 2000
    assert [x for x, y in found if y is None] == [31_234.0]


def test_a_curve_of_nothing_but_nan_is_thinned_too() -> None:
    assert 1 < len(thin([(float(x), None) for x in range(10_000)])) <= 2000


def inset(share: float) -> float:
    """A place on the horizontal scale, which has some space at both ends."""
    return (share + SIDE) / (1 + 2 * SIDE)


def test_points_lie_where_their_values_say() -> None:
    values = [3.0, 7.0, 5.0, 3.5]
    made = chart("k", "K", "k", [Series("k", "s-0", [(10.0 + 5 * place, y) for place, y in enumerate(values)])])
    assert made is not None
    inside = HEIGHT - 2 * MARGIN
    expected = [(WIDTH * inset(place / 3), HEIGHT - MARGIN - inside * (y - 3) / 4) for place, y in enumerate(values)]
    for found, wanted in zip(places(made.curves[0].path), expected, strict=True):
        assert found == pytest.approx(wanted, abs=0.01)


def test_nan_interrupts_the_curve_and_is_marked() -> None:
    points: list[Point] = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.5), (4.0, None), (5.0, 1.0), (10.0, 2.0)]
    made = chart("k", "Loss", "loss", [Series("loss", "s-0", points)])
    assert made is not None
    assert made.curves[0].path.count("M") == 3
    assert [where for where, _ in made.gaps] == pytest.approx([100 * inset(0.2), 100 * inset(0.4)])
    assert made.gaps[0][1] == "loss is not a number at step 2"
    assert made.data["series"][0]["y"] == [1.0, 2.0, None, 1.5, None, 1.0, 2.0]  # type: ignore[index]


def test_a_chart_of_nan_alone_or_of_nothing_is_none() -> None:
    assert chart("k", "K", "k", [Series("k", "s-0", [(0.0, None)])]) is None
    assert chart("k", "K", "k", []) is None


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [-3.0, -3.0], [1e-30, 2e-30], [1e12, 1e12 + 1], [0.1, 1e5]])
@pytest.mark.parametrize("zero", [False, True])
def test_scales_hold_their_values_and_their_ticks(values: list[float], zero: bool) -> None:
    scale = scale_for(values, zero=zero)
    assert scale.low < scale.high
    assert all(-1e-9 <= scale.part(value) <= 1 + 1e-9 for value in (*values, *scale.ticks()))
    assert 1 <= len(scale.ticks()) <= 8


def test_logarithmic_ticks_are_powers_of_ten_if_any_are_in_range() -> None:
    assert Scale(0.05, 2000.0, log=True).ticks() == pytest.approx([0.1, 1, 10, 100, 1000])
    assert len(Scale(2.0, 3.0, log=True).ticks()) == 5
    assert Scale(1.0, 100.0, log=True).part(10.0) == pytest.approx(0.5)


def test_one_huge_value_makes_the_scale_logarithmic() -> None:
    assert is_spiky([1.0, 1.1, 0.9, 1000.0])
    assert not is_spiky([1.0, 1.1, 0.9, 10.0])
    assert not is_spiky([0.0, 1.0, 1.0, 1000.0])


def test_every_span_is_drawn_when_it_was() -> None:
    timed = simulate(make_schedule("1f1b", 4, 4, 6), {(k, s): {"F": 1.0}.get(k, 2.0) for k in "FB" for s in range(4)})  # type: ignore[misc]
    doings = [GanttActivity(each.rank, each.action.kind, each.begin, each.end, "does") for each in timed.events]
    made = draw(doings, ACTIONS, "measured", "")
    assert made.shown == made.events == len(made.blocks) == 48
    tops = [top for _, top, _ in made.rows]
    for doing, block in zip(sorted(doings, key=lambda each: (each.begin, -each.end)), made.blocks, strict=True):
        assert block.left == pytest.approx(100 * doing.begin / timed.makespan)
        assert block.width == pytest.approx(100 * (doing.end - doing.begin) / timed.makespan)
        assert tops[doing.rank] <= block.top <= block.top + block.height <= tops[doing.rank] + made.rows[0][2]
    assert made.height == pytest.approx(4 * made.rows[0][2])


def test_messages_have_a_thin_row_below_their_rank() -> None:
    made = draw(
        [GanttActivity(0, "F", 0, 1, ""), GanttActivity(0, "B", 0, 1, "", thin=True), GanttActivity(1, "F", 0, 1, "")],
        ACTIONS,
        "",
        "",
    )
    (first, top, tall), (_, below, thin_), (second, under, _) = made.rows
    assert (first, second) == ("rank 0", "rank 1")
    assert (top, below, under) == (0.0, tall, tall + thin_)
    assert thin_ < tall


def test_draw_of_1000_ranks_shows_some_and_counts_the_rest() -> None:
    made = draw([GanttActivity(rank, "F", 0, 1, "") for rank in range(1000)], ACTIONS, "measured", "")
    assert len(made.rows) == MOST_RANKS
    assert made.left_out == 1000 - MOST_RANKS


def test_typical_step_has_the_median_length_without_the_first() -> None:
    lengths = {10: 9.0, 11: 1.0, 12: 1.3, 13: 5.0}
    spans = [Span("f", "forward", "host", 100.0 * step, 100.0 * step + took, step) for step, took in lengths.items()]
    assert typical_step(spans) == 12
    assert typical_step(spans[:1]) == 10
    assert typical_step([]) is None


def test_devices_are_grouped_by_host_and_coloured_by_stage() -> None:
    ranks = [
        {
            "rank": rank,
            "host": f"h{rank // 2}",
            "device": "cuda:0 H100",
            "at": {"replicate": rank // 2, "stage": rank % 2},
        }
        for rank in range(4)
    ]
    stages = [{"stage": stage, "ranks": [stage, 2 + stage], "units": [f"l{stage}", "x"]} for stage in range(2)]
    facts = RunMetadata.of({"ranks": ranks, "stages": stages, "mesh": {"replicate": 2, "stage": 2, "split": 1}})
    assert facts is not None
    found = placement(facts)
    assert found is not None
    assert [(host.name, [each.rank for each in host.devices]) for host in found.hosts] == [
        ("h0", [0, 1]),
        ("h1", [2, 3]),
    ]
    last = found.hosts[1].devices[1]
    assert (last.place, last.colour, last.units) == ("replicate 1, stage 1", 1, "l1 to x")
