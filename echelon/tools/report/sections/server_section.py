"""Section about parameter servers: rows, traffic, requests, staleness and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echelon.base import formatting
from echelon.observability.runlog.run_reader import Run, ServerRecord
from echelon.tools.report.figures.curves import Chart, chart
from echelon.tools.report.sections.html_table import HtmlTable
from echelon.tools.report.sections.rank_section import lines, most_of

Looks = Mapping[int, Sequence[ServerRecord]]


@dataclass(frozen=True)
class ServerSection:
    charts: list[Chart]
    table: HtmlTable
    tables: HtmlTable | None


def serving(run: Run) -> ServerSection | None:
    there = {server: looks for server, looks in run.servers.items() if looks}
    if not there:
        return None
    return ServerSection(_charts(there), _servers(there), _rows(there))


def _charts(there: Looks) -> list[Chart]:
    first = min(looks[0].time for looks in there.values())
    figures: dict[str, tuple[str, str, Callable[[Sequence[ServerRecord]], list[tuple[float, float]]]]] = {
        "rows": ("Rows", "rows", lambda looks: _values(looks, lambda look: float(sum(look.rows.values())))),
        "in": ("Received", "MB/s", lambda looks: rates(looks, lambda look: look.bytes_in / 1e6)),
        "out": ("Sent", "MB/s", lambda looks: rates(looks, lambda look: look.bytes_out / 1e6)),
        "requests": ("Pulls and pushes", "a second", lambda looks: rates(looks, lambda look: look.pulls + look.pushes)),
        "stale": ("Staleness in the mean", "steps", lambda looks: _values(looks, lambda look: look.staleness_mean)),
        "memory": ("Memory", "GB", lambda looks: _values(looks, lambda look: look.memory / 1e9 or None)),
    }
    found = []
    for key, (title, unit, points) in figures.items():
        of_each = {server: [(time - first, y) for time, y in points(looks)] for server, looks in there.items()}
        made = chart(
            f"server-{key}", f"{title}{most_of(of_each)}", unit, lines(of_each, "server"), x="second", zero=True
        )
        found.append(made)
    return [each for each in found if each is not None]


def _values(looks: Sequence[ServerRecord], value: Callable[[ServerRecord], float | None]) -> list[tuple[float, float]]:
    return [(look.time, found) for look in looks if (found := value(look)) is not None]


def rates(looks: Sequence[ServerRecord], count: Callable[[ServerRecord], float]) -> list[tuple[float, float]]:
    """Return (time, rate per second) between successive records.

    If a count decreases, the server has restarted and counts from zero.
    """
    found = []
    for before, after in itertools.pairwise(looks):
        seconds, more = after.time - before.time, count(after) - count(before)
        if seconds > 0:
            found.append((after.time, (more if more >= 0 else count(after)) / seconds))
    return found


def _servers(there: Looks) -> HtmlTable:
    last = {server: looks[-1] for server, looks in there.items()}
    columns: dict[str, Callable[[ServerRecord], str]] = {
        "rows": lambda look: f"{sum(look.rows.values()):,}",
        "received": lambda look: formatting.size(look.bytes_in),
        "sent": lambda look: formatting.size(look.bytes_out),
        "pulls": lambda look: f"{look.pulls:,}",
        "pushes": lambda look: f"{look.pushes:,}",
        "staleness, steps": _staleness,
        "memory": lambda look: formatting.size(look.memory) if look.memory else "",
    }
    shown = [name for name in columns if any(columns[name](look) for look in last.values())]
    rows = [(str(server), *(columns[name](look) for name in shown)) for server, look in last.items()]
    head = ("server", *shown)
    return HtmlTable("Servers, since each was started", head, rows, tuple(range(len(head))))


def _staleness(look: ServerRecord) -> str:
    """Return mean and maximum staleness as text; "" for synchronous workers."""
    if look.staleness_mean is None:
        return ""
    most = "" if look.staleness_max is None else f" (at most {look.staleness_max})"
    return f"{look.staleness_mean:.3g}{most}"


def _rows(there: Looks) -> HtmlTable | None:
    names = dict.fromkeys(name for looks in there.values() for name in looks[-1].rows)
    rows = [
        (name, *(f"{looks[-1].rows.get(name, 0):,}" for looks in there.values()), f"{_sum(name, there):,}")
        for name in names
    ]
    head = ("table", *(f"server {server}" for server in there), "in all")
    return HtmlTable("Rows by table", head, rows, tuple(range(1, len(head)))) if rows else None


def _sum(name: str, there: Looks) -> int:
    return sum(looks[-1].rows.get(name, 0) for looks in there.values())
