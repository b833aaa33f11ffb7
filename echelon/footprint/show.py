"""A footprint as tables for people."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from echelon.amounts import amount, percent, size, unit_for
from echelon.footprint.footprint import Job
from echelon.record.facts import Footprint, ModuleBytes

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers")
#: What the words mean that do not say it themselves.
NOTES = {
    "transient": "for a moment: what computing and updating need on top",
    "exchange": "messages under way",
    "buffers": "of the model, the batch, and what libraries keep",
}


def show(title: str, job: Job, found: Footprint) -> str:
    return "\n".join([f"{title}: {job}", "", *_peak(found), "", *_modules(found), "", *_savings(found)])


def _peak(found: Footprint) -> Iterator[str]:
    yield f"peak {size(found.peak)}, in {found.moment}:"
    for kind, value in found.kinds.items():
        if value:
            note = f"   {NOTES[kind]}" if kind in NOTES else ""
            yield f"  {kind:<12}{size(value):>10}{percent(value / found.peak):>8}{note}"


def _modules(found: Footprint) -> Iterator[str]:
    """Neighbours that hold the same are one line."""
    named = [(_names(alike), alike[0]) for alike in _alike(found.modules)]
    whole = [sum(getattr(row, column) for row in found.modules) for column in COLUMNS]
    word, unit = unit_for(max(whole) / 10)
    width = max([len(name) for name, _ in named] + [len("all of it")])
    yield f"{f'by module, {word}':<{width}}" + "".join(f"{column:>13}" for column in COLUMNS)
    for name, row in named:
        yield f"{name:<{width}}" + "".join(f"{amount(getattr(row, column), unit):>13}" for column in COLUMNS)
    yield f"{'all of it':<{width}}" + "".join(f"{amount(value, unit):>13}" for value in whole)


def _alike(rows: Sequence[ModuleBytes]) -> list[list[ModuleBytes]]:
    grouped = itertools.groupby(rows, key=lambda row: [getattr(row, column) for column in COLUMNS])
    return [list(alike) for _, alike in grouped]


def _names(rows: Sequence[ModuleBytes]) -> str:
    if len(rows) == 1:
        return rows[0].name
    return f"{rows[0].name} .. {rows[-1].name}, each of {len(rows)}"


def _savings(found: Footprint) -> Iterator[str]:
    if not found.savings:
        yield "none of recompute, amp, shard and a smaller batch would lower the peak"
        return
    yield "the peak would be lower with"
    for saving in found.savings:
        yield f"  {saving.what:<12}by {size(saving.bytes)} ({percent(saving.bytes / found.peak)})"
