"""Format a PlanReport as tables: with rich on a terminal, as aligned text elsewhere."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from echelon.base import formatting
from echelon.base.quantities import Kind
from echelon.base.quantities import show as quantity_words
from echelon.plan.prediction import PARTS, PredictedMemory
from echelon.planner.plan_search.search_result import PlanChoice
from echelon.tools.plan_report.report_data import (
    ClusterFigure,
    ClusterSummary,
    PlanAlternative,
    PlanReport,
    ScalingPoint,
    StageUnits,
    samples_per_second,
)

#: Description of each part of a step's time, shown in the tables.
MEANING = {
    "compute": "forward and backward of the busiest rank",
    "recompute": "forward once more, before backward",
    "bubble": "waiting for other stages",
    "split": "messages inside layers",
    "pipeline": "messages between stages",
    "gradients": "sums over replicas, where computing does not hide them",
    "parameters": "gathering what replicas share out",
    "batch norm": "statistics over replicas",
    "update": "the optimizer",
    "host": "Python, loading, the loss",
}

#: The parts of a device's memory, in display order.
HELD = tuple(field.name for field in fields(PredictedMemory) if field.name != "limit")


#: Width of plain text in characters. Only the last cell of a row is wrapped to fit.
WIDTH = 130


@dataclass(frozen=True)
class TitledTable:
    """A table with a title.

    rows:   cells of the table, as strings
    head:   column headings; () for none
    right:  indices of the right-aligned columns (numbers); all other columns are left-aligned
    note:   a line below the table; empty for none
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    head: tuple[str, ...] = ()
    right: tuple[int, ...] = ()
    note: str = ""


def sections(report: PlanReport) -> list[TitledTable]:
    """Return all non-empty tables of the report, in reading order."""
    if not report.options:
        return [*_nearest(report), figures(report.machines)]
    choice = report.choice
    found = [
        plans(report),
        times(choice),
        memory(choice),
        contents(report.stages),
        TitledTable("To know", [(note,) for note in report.notes]),
        neighbours(report.neighbours),
        approximate(report.approximate),
        sensitivities(report.sensitivities),
        sizes(report.sizes, report.batch),
        figures(report.machines),
    ]
    return [section for section in found if section.rows]


def headline(report: PlanReport) -> list[str]:
    weights = f"{formatting.count(report.weights)} parameters in {formatting.things(report.units, 'unit')}"
    runs_as = f", {report.runs_as}" if report.runs_as else ""
    return [f"{report.model}: {weights}, batch {report.batch:,}{runs_as}", f"on {report.machines.words}"]


def plain(report: PlanReport) -> str:
    """Return the whole report as text without colors."""
    return text_of(headline(report), sections(report))


def text_of(lines: Sequence[str], tables: Sequence[TitledTable]) -> str:
    """Return a headline and tables as text without colors."""
    return "\n\n".join(["\n".join(lines), *map(_plain, tables)])


# ---- the sections ----


def plans(report: PlanReport) -> TitledTable:
    best = report.choice.seconds
    rows = [
        (
            str(place),
            str(option.draft),
            formatting.duration(option.seconds),
            formatting.rate(samples_per_second(option)),
            of_limit(option.prediction.fullest),
            formatting.percent(option.seconds / best - 1, signed=True) if place > 1 else "best",
        )
        for place, option in enumerate(report.options, start=1)
    ]
    head = ("", "plan", "a step", "samples/s", "fullest device", "against it")
    title = f"Plans (the best of {report.considered:,} in {formatting.duration(report.seconds)})"
    return TitledTable(title if report.considered else "Plan", rows, head, (0, 2, 3, 4, 5))


def times(choice: PlanChoice) -> TitledTable:
    rows = [
        (part, formatting.duration(seconds), formatting.percent(share), "#" * round(40 * share), MEANING.get(part, ""))
        for part, seconds, share in time_parts(choice)
    ]
    return TitledTable(f"Time of a step: {formatting.duration(choice.seconds)}", rows, right=(1, 2))


def time_parts(choice: PlanChoice) -> Iterator[tuple[str, float, float]]:
    """Yield (part, seconds, fraction of the step) for each part that takes time."""
    whole, parts = choice.seconds, choice.prediction.parts
    for part in (*PARTS, *(name for name in parts if name not in PARTS)):
        if parts.get(part, 0.0) > 0:
            yield part, parts[part], parts[part] / whole


def memory(choice: PlanChoice) -> TitledTable:
    held = [name for name in HELD if any(getattr(each, name) for each in choice.prediction.memory)]
    unit, scale = formatting.unit_for(max(each.total for each in choice.prediction.memory))
    shown = [
        (*(formatting.amount(getattr(each, name), scale) for name in held), of_limit(each))
        for each in choice.prediction.memory
    ]
    several = len(shown) > 1
    rows = [(place if several else "each", *row) for place, row in _runs(shown)]
    title = f"Memory of a device, {unit}{', by rank along the stage axis' if several else ''}"
    head = ("rank" if several else "", *held, "in all")
    return TitledTable(title, rows, head, tuple(range(1, len(head))))


def contents(stages: Sequence[StageUnits]) -> TitledTable:
    if len(stages) < 2:
        return TitledTable("Stages", [])
    rows = [
        (
            str(stage.stage),
            f"rank {stage.rank}",
            str(len(stage.units)),
            f"{span(stage.units)}{', recomputed' if stage.recompute else ''}",
        )
        for stage in stages
    ]
    return TitledTable("Stages", rows, ("stage", "on", "units", "which"), (0, 2))


def neighbours(remarks: Sequence[PlanAlternative]) -> TitledTable:
    rows = [(f"{remark.what}: {in_words(remark)}",) for remark in remarks]
    return TitledTable("Why not another plan", rows)


def approximate(remarks: Sequence[PlanAlternative]) -> TitledTable:
    rows = [(remark.what, in_words(remark), remark.plan) for remark in remarks]
    note = "These change the numbers, so they are only used where you allow them: --allow NAME,..."
    return TitledTable("What approximate techniques would gain", rows, right=(1,), note=note)


def sensitivities(remarks: Sequence[PlanAlternative]) -> TitledTable:
    return TitledTable(
        "On other machines or batches", [(remark.what, in_words(remark), remark.plan) for remark in remarks]
    )


def sizes(found: Sequence[ScalingPoint], batch: int) -> TitledTable:
    rows = [
        (
            f"{size.devices:,}",
            formatting.duration(size.seconds) if size.seconds else "none fits",
            formatting.rate(batch / size.seconds) if size.seconds else "",
            size.plan,
        )
        for size in found
    ]
    return TitledTable("Time over the number of devices", rows, ("devices", "a step", "samples/s", "plan"), (0, 1, 2))


def figures(machines: ClusterSummary) -> TitledTable:
    """Return the table of cluster figures that predictions use, with their origin (measured, default, ...)."""
    rows = []
    for of, group in itertools.groupby(machines.figures, key=lambda figure: figure.of):
        for origin, same in itertools.groupby(group, key=lambda figure: figure.origin):
            rows.append((of, origin, ", ".join(figure_in_words(figure) for figure in same)))
    note = "" if all(figure.origin != "default" for figure in machines.figures) else MEASURE
    return TitledTable("Figures used", rows, note=note)


MEASURE = "Defaults are those of the device's kind; 'echelon bench --out FILE' measures, plan --bench FILE uses it."


def figure_in_words(figure: ClusterFigure) -> str:
    """Return a figure as text: ``bfloat16 989 TFLOP/s``, ``latency 5 us``."""
    if figure.unit == "B":
        return f"{figure.what} {formatting.size(figure.value)}"
    kind = _QUANTITIES.get(figure.unit)
    return f"{figure.what} {quantity_words(figure.value, kind) if kind else f'{figure.value:.3g} {figure.unit}'}"


_QUANTITIES: dict[str, Kind] = {"FLOP/s": "FLOP/s", "B/s": "bytes/s", "s": "seconds"}


def _nearest(report: PlanReport) -> Iterator[TitledTable]:
    yield TitledTable("No plan fits", [(report.reason,)])
    if report.nearest is not None:
        rows = [(str(report.nearest.draft), of_limit(report.nearest.prediction.fullest))]
        yield TitledTable("The plan that lacks least", rows, ("plan", "fullest device"), (1,))
        yield memory(report.nearest)


# ---- words ----


def in_words(remark: PlanAlternative) -> str:
    """Return ``+14%, all-reduce crosses hosts``; only the reason if the alternative is not possible."""
    change = "" if remark.against is None else formatting.percent(remark.against, signed=True)
    return ", ".join(word for word in (change, remark.why) if word) or "no plan"


def of_limit(held: PredictedMemory) -> str:
    unit, scale = formatting.unit_for(held.total)
    total = formatting.amount(held.total, scale)
    if not held.limit:
        return f"{total} {unit}"
    limit = f"{formatting.amount(held.limit, 1e9)} GB"
    return f"{total} of {limit}" if unit == "GB" else f"{total} {unit} of {limit}"


def span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _runs(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Merge consecutive equal rows into one: ``("1 to 6", row)``."""
    for row, group in itertools.groupby(enumerate(rows), key=lambda numbered: numbered[1]):
        places = [place for place, _ in group]
        yield (str(places[0]) if len(places) == 1 else f"{places[0]} to {places[-1]}"), row


# ---- text, and rich ----


def _plain(section: TitledTable) -> str:
    rows = [section.head, *section.rows] if section.head else list(section.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    room = max(40, WIDTH - sum(widths[:-1]) - 2 * last)
    if last not in section.right:
        rows = [line for row in rows for line in _folded(row, room)]
    return "\n".join([section.title, *formatting.text_table(rows, right=section.right, indent=2), *_note(section)])


def _folded(row: tuple[str, ...], room: int) -> Iterator[tuple[str, ...]]:
    """Yield a row, or several rows if its last cell is too long."""
    *cells, last = row
    for fold in textwrap.wrap(last, room, break_long_words=False) or [""]:
        yield (*cells, fold)
        cells = [""] * len(cells)


def _note(section: TitledTable) -> list[str]:
    return [f"  {section.note}"] if section.note else []


def on_terminal(report: PlanReport) -> None:
    """Print the report with rich: bold titles, columns wrapped to the terminal width."""
    print_tables(headline(report), sections(report))


def print_tables(lines: Sequence[str], tables: Sequence[TitledTable]) -> None:
    """Print a headline and tables with rich."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    title, *rest = lines
    console.print(Text(title, style="bold"))
    console.print(Text("\n".join(rest)))
    for section in tables:
        table = Table(box=box.SIMPLE_HEAD if section.head else None, show_header=bool(section.head), pad_edge=False)
        for place, name in enumerate(section.head or [""] * len(section.rows[0])):
            right = place in section.right
            table.add_column(Text(name), justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(Text(f"\n{section.title}", style="bold cyan"))
        console.print(table)
        for line in _note(section):
            console.print(Text(line, style="dim"))
