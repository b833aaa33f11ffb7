"""Formats a summary: a few lines at the end of a trace, and a table for ``echelon timeline``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.base.formatting import duration, percent, size, text_table, things
from echelon.observability.trace import truncated_text

if TYPE_CHECKING:
    from echelon.observability.trace.summary import Summary

#: Columns of the table and their titles.
COLUMNS = {
    "compute_ms": "compute",
    "update_ms": "update",
    "exposed_ms": "exposed",
    "bubble_ms": "bubble",
    "data_ms": "data",
    "server_ms": "server",
    "other_ms": "other",
    "step_ms": "step",
}


def short_lines(summary: Summary) -> list[str]:
    """Return lines with the parts of the step, the slowest rank, and the path of the trace."""
    figures, cut = summary.figures, summary.figures.get("cut")
    headlines = [f"timeline: {truncated_text.headline(cut)}"] if cut else []
    if not figures["ranks"]:
        return headlines or ["timeline: nothing was recorded"]
    parts = ", ".join(f"{name} {percent(share)}" for name, share in _shares(figures) if share >= 0.001)
    lines = [*headlines, f"timeline of {_steps(figures)}: {_ms(figures['step_ms'])} a step; {parts}"]
    if (slow := _slowest(figures)) is not None:
        lines.append(f"timeline: {slow}")
    if summary.trace is not None:
        lines.append(f"timeline: {summary.trace} opens in ui.perfetto.dev")
    return lines


def text(summary: Summary) -> str:
    """Return the whole summary as text."""
    figures, cut = summary.figures, summary.figures.get("cut")
    blocks = [truncated_text.lines(cut)] if cut else []
    blocks += _figures(figures) if figures["ranks"] else [["no step was recorded whole"]]
    where = [f"trace: {summary.trace} (ui.perfetto.dev, chrome://tracing)"] if summary.trace is not None else []
    if summary.aside is not None:
        where.append(f"an earlier attempt was cut short: 'echelon timeline {summary.aside}' shows it")
    return "\n\n".join("\n".join(block) for block in (*blocks, where) if block)


def _figures(figures: dict[str, Any]) -> list[list[str]]:
    return [
        [f"{_steps(figures)}, {things(len(figures['ranks']), 'rank')}: {_ms(figures['step_ms'])} a step (median)"],
        _table([["rank", *COLUMNS.values()], *map(_rank_row, figures["ranks"]), _share_row(figures)]),
        list(_findings(figures)),
        _communication(figures["communication"]),
    ]


def _findings(figures: dict[str, Any]) -> list[str]:
    found = []
    if (slow := _slowest(figures)) is not None:
        found.append(slow)
    if len(figures["ranks"]) > 1:
        found.append(f"exposed communication: {percent(figures['exposed_communication'])} of the time of all ranks")
    if (bubble := figures.get("bubble")) is not None:
        found.append(_bubble(bubble))
    if figures.get("mfu") is not None:
        found.append(f"MFU: {percent(figures['mfu'])} of what the devices promise")
    if figures.get("clock_error_ms"):
        found.append(f"clocks agree to {_ms(figures['clock_error_ms'])}")
    return found


def _bubble(bubble: dict[str, float | None]) -> str:
    words = f"bubble: {percent(bubble['measured'] or 0.0)} of the pipelines' time"
    if bubble.get("theory") is not None:
        words += f"; by theory {percent(bubble['theory'] or 0.0)} with these durations"
    if bubble.get("even") is not None:
        words += f", {percent(bubble['even'] or 0.0)} with even stages"
    return words


def _slowest(figures: dict[str, Any]) -> str | None:
    if figures.get("slowest_ms") is None:
        return None
    words = f"slowest: rank {figures['slowest']}, {_ms(figures['slowest_ms'])} a step more own time than the others"
    late = figures.get("waited_for")
    if late is not None and late["ms"] > 0:
        words += f"; others waited {_ms(late['ms'])} a step for rank {late['rank']}"
    return words


def _communication(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = ["communication of a step", "bytes", "time", "GB/s"]
    body = [
        [row["name"], size(row["bytes"]), _ms(row["ms"]), "-" if row["gb_per_s"] is None else f"{row['gb_per_s']:.3g}"]
        for row in rows
    ]
    return _table([head, *body])


def _shares(figures: dict[str, Any]) -> list[tuple[str, float]]:
    total = sum(row["step_ms"] for row in figures["ranks"])
    names = {key: name for key, name in COLUMNS.items() if key != "step_ms"} | {"exposed_ms": "exposed communication"}
    shares = [(name, sum(row[key] for row in figures["ranks"]) / total) for key, name in names.items() if total]
    return sorted(shares, key=lambda share: -share[1])


def _rank_row(row: dict[str, Any]) -> list[str]:
    return [str(row["rank"]), *(f"{row[key]:.2f}" for key in COLUMNS)]


def _share_row(figures: dict[str, Any]) -> list[str]:
    rows = figures["ranks"]
    total = sum(row["step_ms"] for row in rows)
    return ["share", *(percent(sum(row[key] for row in rows) / total if total else 0.0) for key in COLUMNS)]


def _table(rows: list[list[str]]) -> list[str]:
    return text_table(rows, right=range(1, len(rows[0])))


def _steps(figures: dict[str, Any]) -> str:
    first, last = figures["steps"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _ms(milliseconds: float) -> str:
    return duration(milliseconds / 1e3)
