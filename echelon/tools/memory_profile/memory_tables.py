"""Format a Footprint as text tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from echelon.base.formatting import amount, percent, size, text_table, unit_for
from echelon.observability.runlog.rank_names import ranks_in_words
from echelon.observability.runlog.run_metadata import Footprint, ModuleBytes

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers")
#: Explanations of the kinds whose names do not explain themselves.
NOTES = {
    "transient": "temporary: workspace of forward, backward and update",
    "exchange": "messages in flight or waiting to be sent",
    "buffers": "of the model, the batch and the libraries",
}
#: Most groups of equal ranks for which modules are listed; with more groups, only those of the fullest rank are.
MOST = 8


def show(title: str, found: Footprint) -> str:
    groups = list(_groups(found))
    parts = [_peak(found, groups), _ranks(found, groups), *_all_modules(found), _savings(found), found.notes]
    blocks = ["\n".join(part) for part in parts]
    return "\n\n".join([f"{title}: {found.how}", *filter(None, blocks)])


def _peak(found: Footprint, groups: Sequence[Sequence[Footprint]]) -> Iterator[str]:
    fullest = next((alike for alike in groups if any(one.ranks == found.ranks for one in alike)), ())
    where = f" on {_together(fullest)}" if len(groups) > 1 else ""
    yield f"peak about {size(found.peak)}{where}, in {found.moment}:"
    for kind, value in found.kinds.items():
        if value:
            note = f"   {NOTES[kind]}" if kind in NOTES else ""
            yield f"  {kind:<12}{size(value):>10}{percent(value / found.peak):>8}{note}"


# ---- ranks ----


def _groups(found: Footprint) -> Iterator[list[Footprint]]:
    """Yield groups of ranks of one stage whose displayed figures are equal."""
    alike: dict[tuple[str, ...], list[Footprint]] = {}
    for one in found.each:
        alike.setdefault((_stage(one), *_cells(found, one)), []).append(one)
    yield from alike.values()


def _cells(found: Footprint, one: Footprint) -> list[str]:
    _, unit = unit_for(found.peak / 10)
    return [*(amount(value, unit) for value in (*_whole(one), one.peak)), one.moment]


def _ranks(found: Footprint, groups: Sequence[Sequence[Footprint]]) -> Iterator[str]:
    if len(groups) < 2:
        return
    named = [(_together(alike), _cells(found, alike[0])) for alike in groups]
    title = f"by rank, {unit_for(found.peak / 10)[0]}"
    yield from _table([(title, *COLUMNS, "peak", "in"), *((name, *cells) for name, cells in named)])


def _stage(one: Footprint) -> str:
    return one.place.partition(", ")[0] if one.place.startswith("stage") else ""


def _together(alike: Sequence[Footprint]) -> str:
    """Return ``stage 0: ranks 0 and 2``; the position along the split axis is named only for a single footprint."""
    ranks = ranks_in_words(sorted(rank for one in alike for rank in one.ranks))
    place = alike[0].place if len(alike) == 1 else _stage(alike[0])
    return f"{place}: {ranks}" if place else ranks


# ---- modules ----


def _all_modules(found: Footprint) -> Iterator[Iterator[str]]:
    """Yield one table per group of ranks; ranks whose tables look equal after rounding share one."""
    kinds: dict[tuple[str, ...], list[Footprint]] = {}
    every = found.each or (found,)
    unit = unit_for(max(max(_whole(one)) for one in every) / 10)
    for one in every:
        kinds.setdefault(tuple(_modules(one, "", unit)), []).append(one)
    if len(kinds) > MOST:
        yield _modules(found, f", {_together([found])}", unit)
        return
    for alike in kinds.values():
        yield _modules(alike[0], f", {_together(alike)}" if len(kinds) > 1 else "", unit)


def _whole(found: Footprint) -> list[int]:
    return [sum(getattr(row, column) for row in found.modules) for column in COLUMNS]


def _modules(found: Footprint, whose: str, of: tuple[str, float]) -> Iterator[str]:
    """Yield the lines of a table of modules; consecutive modules with equal bytes share one line."""
    named = [(_names(alike), alike[0]) for alike in _alike(found.modules)]
    word, unit = of
    rows = [(name, *(amount(getattr(row, column), unit) for column in COLUMNS)) for name, row in named]
    whole = (amount(value, unit) for value in _whole(found))
    yield from _table([(f"by module{whose}, {word}", *COLUMNS), *rows, ("all of it", *whole)])


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align a title or name, figures in columns of equal width, and the moment of the peak in a seventh column."""
    return text_table([[name, *(f"{cell:>11}" for cell in cells[:6]), *cells[6:]] for name, *cells in rows])


def _alike(rows: Sequence[ModuleBytes]) -> list[list[ModuleBytes]]:
    grouped = itertools.groupby(rows, key=lambda row: [getattr(row, column) for column in COLUMNS])
    return [list(alike) for _, alike in grouped]


def _names(rows: Sequence[ModuleBytes]) -> str:
    if len(rows) == 1:
        return rows[0].name
    return f"{rows[0].name} .. {rows[-1].name}, each of {len(rows)}"


def _savings(found: Footprint) -> Iterator[str]:
    if not found.savings:
        yield "none of recompute, amp, shard, low_memory and a smaller batch would lower the peak"
        return
    yield "the peak would be lower with"
    for saving in found.savings:
        yield f"  {saving.what:<12}by {size(saving.bytes)} ({percent(saving.bytes / found.peak)})"
