"""Rendering of several runs as one page: a table of the runs, their curves together, and the settings that differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from echelon.base import formatting
from echelon.observability.runlog.run_reader import Run, read
from echelon.tools.report.figures.curves import Chart, Point, Series, chart, figure
from echelon.tools.report.run_page import page_environment, page_script
from echelon.tools.report.sections.html_table import HtmlTable, sampled
from echelon.tools.report.sections.overview import OverviewStatus, duration, moment, status
from echelon.tools.report.sections.phases import median_step
from echelon.tools.report.sections.setup import environment_rows
from echelon.tools.report.sections.setup import in_words as value_in_words

#: Largest number of runs whose curves are drawn: each has a colour of its own. Of more runs these are the newest.
MOST_CURVES = 8
#: Facts of a run that are no choice of its user: a difference says nothing.
ALWAYS_DIFFERENT = ("started",)


@dataclass(frozen=True)
class RunRow:
    """A row of the table of runs.

    link:   address of the run's own page, relative to this one; None without one
    colour: index of the colour of its curves; None if they are not drawn
    cells:  text of the columns in ``COLUMNS``
    """

    name: str
    link: str | None
    colour: int | None
    status: OverviewStatus
    cells: list[str]


def runs_below(directory: Path) -> list[Path]:
    """Return the directories below this one that hold a run, the oldest first; runs inside of runs count, too."""
    found = {path.parent for name in ("run.json", "metrics.jsonl") for path in directory.rglob(name)}
    return sorted(found, key=lambda each: (_began(read(each)), each))


def _began(run: Run) -> float:
    if run.facts is not None:
        return run.facts.began
    return (run.steps[0].time or 0.0) if run.steps else 0.0


def render_runs(runs: Sequence[Run], title: str, out: Path, now: float) -> str:
    """Render the page as HTML text.

    runs: in the order of the table
    out:  file of the page, from which links lead to the runs' own pages
    now:  current time, in seconds since the epoch
    """
    names = short_names([run.directory for run in runs])
    newest = sorted(range(len(runs)), key=lambda place: _began(runs[place]))[-MOST_CURVES:]
    colours = {place: colour for colour, place in enumerate(sorted(newest))}
    drawn = [(names[place], runs[place]) for place in colours]
    view: dict[str, Any] = {
        "title": title,
        "made": moment(now),
        "columns": list(COLUMNS),
        "rows": [_row(run, names[place], colours.get(place), out, now) for place, run in enumerate(runs)],
        "charts": list(charts(drawn)),
        "left_out": len(runs) - len(drawn),
        "differences": differences(drawn),
        "sampled": sampled,
    }
    return page_environment().get_template("runs.html.j2").render(**view, **page_script(live=False))


def short_names(directories: Sequence[Path]) -> list[str]:
    """Return the paths of the runs without what all have in common."""
    places = [str(each.resolve()) for each in directories]
    common = os.path.commonpath(places) if len(set(places)) > 1 else os.path.dirname(places[0])
    return [os.path.relpath(place, common) if place != common else os.path.basename(place) for place in places]


# ---- the table of runs ----

COLUMNS: dict[str, Callable[[Run, OverviewStatus, float], str]] = {
    "started (UTC)": lambda run, *_: moment(_began(run)).removesuffix(" UTC") if _began(run) else "",
    "took": lambda run, state, now: duration(run, state, now) if run.facts else "",
    "steps": lambda run, *_: f"{run.steps[-1].step:,}" if run.steps else "",
    "loss": lambda run, *_: _figure([each.loss for each in run.steps][-1:]),
    "evaluated": lambda run, *_: "\n".join(
        f"{name} {figure(value)}" for each in run.evaluations[-1:] for name, value in each.results.items()
    ),
    "examples/s, median": lambda run, *_: _rate([each.examples_per_s for each in run.steps]),
    "a step, median": lambda run, *_: _milliseconds(median_step([each.phases for each in run.steps])),
    "memory at most": lambda run, *_: formatting.size(most) if (most := _most_memory(run)) else "",
}


def _row(run: Run, name: str, colour: int | None, out: Path, now: float) -> RunRow:
    state, page = status(run, now), run.directory / "report.html"
    return RunRow(
        name,
        quote(os.path.relpath(page, out.parent)) if page.exists() else None,
        colour,
        state,
        [column(run, state, now) for column in COLUMNS.values()],
    )


def _figure(values: Sequence[float | None]) -> str:
    return "" if not values else "nan" if values[0] is None else figure(values[0])


def _rate(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return formatting.rate(median(known)) if known else ""


def _milliseconds(value: float | None) -> str:
    return "" if value is None else formatting.duration(value / 1e3)


def _most_memory(run: Run) -> int:
    return max((one.peak or 0 for steps in run.ranks.values() for one in steps), default=0)


# ---- curves ----


def charts(runs: Sequence[tuple[str, Run]]) -> Iterator[Chart]:
    """Yield the charts that have a curve of each run: loss, evaluations, speed, and a step's time."""
    results = dict.fromkeys(name for _, run in runs for each in run.evaluations for name in each.results)
    logged = dict.fromkeys(name for _, run in runs for each in run.logged for name in each.results)
    figures: list[tuple[str, str, bool, Callable[[Run], list[Point]]]] = [
        ("Loss", "loss", False, lambda run: [(float(each.step), each.loss) for each in run.steps]),
        *((f"Evaluation: {name}", name, False, _evaluated(name)) for name in results),
        ("Gradient norm", "norm", False, lambda run: [(float(each.step), each.gradient_norm) for each in run.steps]),
        ("Speed", "examples/s", True, lambda run: [(float(each.step), each.examples_per_s) for each in run.steps]),
        ("Time of a step", "ms", True, _step_times),
        *((f"Logged: {name}", name, False, _logged(name)) for name in logged),
    ]
    for place, (title, unit, zero, points) in enumerate(figures):
        few = title.startswith("Evaluation")
        lines = [Series(name, f"s-{colour}", points(run), dots=few) for colour, (name, run) in enumerate(runs)]
        if (made := chart(f"runs-{place}", title, unit, lines, zero=zero)) is not None:
            yield made


def _evaluated(name: str) -> Callable[[Run], list[Point]]:
    return lambda run: [(float(each.step), each.results[name]) for each in run.evaluations if name in each.results]


def _logged(name: str) -> Callable[[Run], list[Point]]:
    return lambda run: [(float(each.step), each.results[name]) for each in run.logged if name in each.results]


def _step_times(run: Run) -> list[Point]:
    counted = run.steps[1:] or run.steps
    return [(float(each.step), median_step([each.phases])) for each in counted if each.phases]


# ---- settings that differ ----


def differences(runs: Sequence[tuple[str, Run]]) -> HtmlTable | None:
    """Return the settings and facts that are not the same in all runs, a column for each run; None without any."""
    known = [_settings(run) for _, run in runs]
    names = dict.fromkeys(name for each in known for name in each)
    rows = [
        (name, *(each.get(name, "") for each in known))
        for name in names
        if len({each.get(name, "") for each in known}) > 1 and name not in ALWAYS_DIFFERENT
    ]
    head = ("setting", *(name for name, _ in runs))
    return HtmlTable("Settings that differ", head, rows) if rows else None


def _settings(run: Run) -> dict[str, str]:
    if run.facts is None:
        return {}
    mesh = {f"mesh: {axis}": str(size) for axis, size in run.facts.mesh.items()}
    settings = {each.name: value_in_words(each.value) for each in run.facts.settings if each.name != "global_batch"}
    return dict(environment_rows(run.facts)) | {"ranks": str(run.facts.world.size)} | mesh | settings
