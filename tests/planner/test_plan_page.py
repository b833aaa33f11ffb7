"""The page of ``echelon plan --html``: its figures are the prediction's, and every rectangle is where it belongs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import BROWSER, WORDS
from harness import LIMIT

from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory, Prediction
from echelon.plan.schedule import make_schedule
from echelon.plan.simulate import simulate
from echelon.planner.plan_search.search_result import PlanChoice
from echelon.tools.html.time_scale import MOST_EVENTS
from echelon.tools.plan_report import plan_page, plan_tables
from echelon.tools.plan_report.report_data import (
    ClusterFigure,
    ClusterSummary,
    PlanAlternative,
    PlanReport,
    ScalingPoint,
    StageUnits,
)

SECONDS = {"F": 0.010, "B": 0.021, "I": 0.010, "W": 0.011}
XHTML = "{http://www.w3.org/1999/xhtml}"


def choice_of(ranks: int = 4, micro_batches: int = 8, schedule: Any = "1f1b", chunks: int = 1) -> PlanChoice:
    stages = ranks * chunks
    durations = {(kind, stage): SECONDS[kind] for kind in "FBIW" for stage in range(stages)}
    timed = simulate(make_schedule(schedule, stages, ranks, micro_batches), durations)  # type: ignore[arg-type]
    busy = max(timed.busy)
    parts = {"compute": 0.75 * busy, "recompute": 0.25 * busy, "bubble": timed.makespan - busy, "split": 0.0}
    parts |= {"gradients": 0.034, "batch norm": 0.002, "update": 0.012}
    memory = [PredictedMemory(9e9, 9e9, 18e9, (ranks - rank) * 3e9, 1e9, 0.4e9, 1e6, 60e9) for rank in range(ranks)]
    draft = Draft(
        batch=512,
        replicate=2,
        stage=ranks,
        chunks=chunks,
        cuts=tuple(range(3, 3 * stages, 3)),
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=(True,) * stages,
    )
    return PlanChoice(draft, Prediction(sum(parts.values()), parts, tuple(memory), timed.events))


def report_of(choice: PlanChoice, model: str = "gpt <96 & more>") -> PlanReport:
    seconds, names = choice.seconds, [f"layers.{place}" for place in range(3 * choice.draft.stages)]
    slower = Prediction(1.07 * seconds, choice.prediction.parts, choice.prediction.memory)
    return PlanReport(
        model=model,
        units=len(names),
        weights=1.75e11,
        batch=512,
        machines=ClusterSummary(
            "1x8xH100", "1 host of 8 H100", 8, (ClusterFigure("H100", "memory", 60e9, "B", "given"),)
        ),
        asked={"model": "gpt:layers=96"},
        options=(choice, PlanChoice(choice.draft.replaced(shard=1), slower)),
        stages=tuple(
            StageUnits(stage, stage % choice.draft.stage, tuple(names[3 * stage : 3 * stage + 3]), True)
            for stage in range(choice.draft.stages)
        ),
        neighbours=(
            PlanAlternative("split 8", 1.14 * seconds, 0.14, "all-reduce crosses hosts"),
            PlanAlternative("no recompute", None, None, "stage 0 needs 93 of 60 GB"),
        ),
        approximate=(PlanAlternative("amp", 0.59 * seconds, -0.41, "", "bf16"),),
        sensitivities=(
            PlanAlternative("twice the network", 0.91 * seconds, -0.09, "", "the same plan"),
            PlanAlternative("half the batch", 1.2 * seconds, 0.2, "", "the same plan"),
        ),
        sizes=(
            ScalingPoint(4, None, ""),
            ScalingPoint(8, seconds, "this"),
            ScalingPoint(16, 0.6 * seconds, "that"),
            ScalingPoint(32, seconds / 2, ""),
        ),
        considered=1234,
        seconds=2.3,
    )


def parsed(report: PlanReport) -> ElementTree.Element:
    """The page as a tree; that it can be read as XML says that every tag is closed and every figure escaped."""
    return ElementTree.fromstring(plan_page.render(report))


def section(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(each for each in root.iter(f"{XHTML}section") if each.get("id") == name)


def rectangles(root: ElementTree.Element, kind: str = "") -> list[ElementTree.Element]:
    return [each for each in root.iter(f"{XHTML}rect") if kind in (each.get("class") or "").split() or not kind]


def number(text: str | None) -> float:
    assert text is not None
    return float(text.rstrip("%"))


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches"),
    [("1f1b", 1, 8), ("interleaved", 2, 8), ("zero-bubble", 1, 12), ("gpipe", 1, 400)],
)
def test_every_rectangle_lies_in_its_picture(schedule: str, chunks: int, micro_batches: int) -> None:
    root = parsed(report_of(choice_of(4, micro_batches, schedule, chunks)))
    seen = 0
    for picture in root.iter(f"{XHTML}svg"):
        height = number(picture.get("height"))
        for rectangle in rectangles(picture):
            x, width, y = (number(rectangle.get(name)) for name in ("x", "width", "y"))
            tall = height if rectangle.get("height") == "100%" else number(rectangle.get("height"))
            assert x >= 0
            assert width >= 0
            assert x + width <= 100.001
            assert 0 <= y <= y + tall <= height + 0.001
            seen += 1
    assert seen > 50


def test_the_schedule_shows_every_action_when_it_happens() -> None:
    choice = choice_of(4, 8)
    blocks = rectangles(section(parsed(report_of(choice)), "schedule"), "block")
    assert len(blocks) == len(choice.prediction.events) == 4 * 8 * 2
    for event, block in zip(choice.prediction.events, blocks, strict=True):
        assert number(block.get("x")) == pytest.approx(100 * event.begin / choice.seconds, abs=1e-3)
        assert number(block.get("width")) == pytest.approx(100 * (event.end - event.begin) / choice.seconds, abs=1e-3)
        assert f"k-{event.action.kind}" in (block.get("class") or "").split()
        title = block.findtext(f"{XHTML}title") or ""
        assert f"micro-batch {event.action.micro}, stage {event.action.stage}, rank {event.rank}:" in title


def test_a_long_schedule_shows_its_beginning_and_its_end() -> None:
    choice = choice_of(8, 1024)
    inside = section(parsed(report_of(choice)), "schedule")
    blocks = rectangles(inside, "block")
    assert 400 < len(blocks) <= MOST_EVENTS
    titles = [block.findtext(f"{XHTML}title") or "" for block in blocks]
    assert any(title.startswith("forward, micro-batch 0, stage 0,") for title in titles)
    assert any(title.startswith("backward, micro-batch 1023, stage 0,") for title in titles)
    assert not any("micro-batch 512," in title for title in titles)
    gap = rectangles(inside, "left-out")[0]
    left, right = number(gap.get("x")), number(gap.get("x")) + number(gap.get("width"))
    for block in blocks:
        x, width = number(block.get("x")), number(block.get("width"))
        assert x + width <= left + 0.01 or x >= right - 0.01


def test_the_parts_of_the_time_are_the_predictions() -> None:
    choice = choice_of()
    inside = section(parsed(report_of(choice)), "time")
    shown = [float(cell.get("data-seconds") or 0) for cell in inside.iter(f"{XHTML}td") if cell.get("data-seconds")]
    assert shown == [seconds for seconds in choice.prediction.parts.values() if seconds]
    widths = [number(each.get("width")) for each in rectangles(inside)]
    assert widths == pytest.approx([100 * seconds / choice.seconds for seconds in shown], abs=1e-3)
    assert sum(widths) == pytest.approx(100, abs=0.01)


def test_memory_bars_are_to_the_scale_of_their_limit() -> None:
    choice = choice_of()
    pictures = list(section(parsed(report_of(choice)), "memory").iter(f"{XHTML}svg"))
    assert len(pictures) == len(choice.prediction.memory)
    for picture, memory in zip(pictures, choice.prediction.memory, strict=True):
        limit = number(next(picture.iter(f"{XHTML}line")).get("x1"))
        for name in plan_tables.HELD:
            bar = rectangles(picture, f"k-{name}")[0]
            assert number(bar.get("width")) / limit == pytest.approx(getattr(memory, name) / memory.limit, abs=1e-4)


def test_a_page_needs_nothing_else() -> None:
    text = plan_page.render(report_of(choice_of()))
    assert "<script" not in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/1999/xhtml"]
    assert not re.search(r"\b(src|href)=|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert "gpt &lt;96 &amp; more&gt;" in text


def test_every_picture_has_a_name_and_its_figures_are_in_a_table() -> None:
    root = parsed(report_of(choice_of()))
    pictures = list(root.iter(f"{XHTML}svg"))
    assert all(picture.get("aria-label") and picture.findtext(f"{XHTML}title") for picture in pictures)
    for name in ("time", "memory", "plans", "sizes", "stages", "figures"):
        assert list(section(root, name).iter(f"{XHTML}table")), name


def test_scaling_that_is_perfect_lies_on_the_dashed_line() -> None:
    sizes = [ScalingPoint(devices, 8.0 / devices, "") for devices in (2, 4, 8, 16)]
    points = plan_page.line(sizes, 8)
    assert [point.y for point in points] == pytest.approx([point.ideal for point in points])
    assert [point.x for point in points] == pytest.approx([8, 36, 64, 92])
    assert [point.chosen for point in points] == [False, False, True, False]


def test_a_plan_without_stages_has_no_schedule_and_one_memory() -> None:
    draft = Draft(batch=64, replicate=8)
    prediction = Prediction(0.2, {"compute": 0.2}, (PredictedMemory(1e9, 1e9, 2e9, 3e9),))
    root = parsed(report_of(PlanChoice(draft, prediction)))
    assert not [each for each in root.iter(f"{XHTML}section") if each.get("id") == "schedule"]
    assert len(list(section(root, "memory").iter(f"{XHTML}svg"))) == 1


def test_where_nothing_fits_the_page_says_what_lacks_least() -> None:
    nearest = choice_of()
    empty = PlanReport(
        "m", 3, 1e6, 8, ClusterSummary("T4", "1 host of 1 T4", 1, ()), {}, (), nearest=nearest, reason="too small"
    )
    root = parsed(empty)
    assert root.findtext(f".//{XHTML}h1") == "No plan fits"
    assert "too small" in "".join(root.itertext())
    assert str(nearest.draft) in "".join(root.itertext())


def test_a_report_comes_back_from_json_as_it_was() -> None:
    report = report_of(choice_of(4, 8, "interleaved", 2))
    data = json.loads(json.dumps(report.to_dict()))
    assert PlanReport.from_dict(data) == report
    assert data["options"][0]["prediction"]["memory"][0]["total"] == pytest.approx(9e9 + 9e9 + 18e9 + 12e9 + 1.401e9)
    assert data["options"][0]["samples_per_second"] == pytest.approx(512 / report.choice.seconds)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium; ECHELON_CHROMIUM names one")
@pytest.mark.parametrize("width", [1280, 500])
def test_in_a_browser_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    """And every block of the schedule is drawn inside its picture, as the browser has laid it out."""
    measure = """<script>addEventListener("load", () => {
      const outside = [...document.querySelectorAll("svg")].flatMap(picture => {
        const frame = picture.getBoundingClientRect();
        return [...picture.querySelectorAll("rect, circle")].filter(each => {
          const box = each.getBoundingClientRect();
          return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
        });
      });
      const flat = [...document.querySelectorAll("rect.block")].filter(each => !each.getBoundingClientRect().width);
      document.title = `measured ${document.documentElement.scrollWidth - innerWidth} ${outside.length} ${flat.length}`;
    });</script>"""
    path = tmp_path / "page.html"
    path.write_text(plan_page.render(report_of(choice_of(8, 64))).replace("</body>", f"{measure}</body>"))
    assert BROWSER is not None
    command = [BROWSER, *WORDS, f"--user-data-dir={tmp_path}/profile", f"--window-size={width},1000"]
    command += ["--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    found = re.search(r"<title>measured (-?\d+) (\d+) (\d+)</title>", drawn)
    assert found, drawn[:500]
    wider, outside, flat = map(int, found.groups())
    assert wider <= 0
    assert (outside, flat) == (0, 0)
