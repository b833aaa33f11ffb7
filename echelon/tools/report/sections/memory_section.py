"""Section about memory: peak of every rank, its composition, the prediction, and possible savings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.base import formatting
from echelon.observability.runlog.rank_names import ranks_in_words
from echelon.observability.runlog.run_metadata import BETWEEN, Footprint, ModuleBytes
from echelon.observability.runlog.run_reader import Run
from echelon.tools.html.bars import BarSegment, stacked
from echelon.tools.report.sections.html_table import HtmlTable

KINDS = ("parameters", "gradients", "optimizer", "activations", "transient", "exchange", "buffers")
#: Largest number of bars and of modules shown.
MOST_BARS, MOST_MODULES = 64, 40


@dataclass(frozen=True)
class MemoryBar:
    """The memory of a device as a bar.

    limit: position of the line that marks the device's memory, in percent; None: no line
    over:  True if the bar exceeds the device's memory
    """

    name: str
    words: str
    bars: list[BarSegment]
    limit: float | None
    over: bool


@dataclass(frozen=True)
class MemoryBarGroup:
    title: str
    held: list[MemoryBar]
    kinds: list[str]
    left_out: int = 0


@dataclass(frozen=True)
class MemorySection:
    """The data of the memory section.

    moment: sentence about the peak of the fullest rank
    notes:  limitations of the figures
    """

    bars: list[MemoryBarGroup]
    moment: str
    modules: HtmlTable | None
    savings: HtmlTable | None
    notes: tuple[str, ...] = ()


def make_memory_section(run: Run) -> MemorySection | None:
    footprint = run.memory
    bars = [each for each in (_footprint(footprint), _peaks(run), _predicted(run)) if each is not None]
    modules, savings = _modules(footprint), _savings(footprint)
    if not bars and modules is None:
        return None
    return MemorySection(bars, _moment(footprint), modules, savings, footprint.notes if footprint else ())


def _moment(footprint: Footprint | None) -> str:
    if footprint is None or not footprint.peak:
        return ""
    how = "measured" if footprint.measured else "reckoned"
    if footprint.moment == BETWEEN:
        return f"Between two steps {_whose(footprint)} holds {formatting.size(footprint.peak)} ({how})."
    when = f", in the {footprint.moment}" if footprint.moment else ""
    return f"The peak of {_whose(footprint)} is {formatting.size(footprint.peak)}{when} ({how})."


def _whose(footprint: Footprint) -> str:
    """Return text such as ``ranks 0 and 2 (stage 0)``; a footprint without ranks is that of rank 0."""
    ranks = ranks_in_words(footprint.ranks or (0,))
    return f"{ranks} ({footprint.place})" if footprint.place else ranks


def _footprint(footprint: Footprint | None) -> MemoryBarGroup | None:
    """Return the bars of the footprint, one for each group of ranks with different footprints."""
    every = [] if footprint is None else list(footprint.each or (footprint,))
    there = [
        (_whose(one), {name: float(value) for name, value in one.kinds.items() if value > 0}, 0.0)
        for one in every
        if any(one.kinds.values())
    ]
    if footprint is None or not there:
        return None
    between = footprint.moment == BETWEEN
    return _bars("What ranks hold between two steps" if between else "What the peak is made of", there)


def _peaks(run: Run) -> MemoryBarGroup | None:
    limits = {each.rank: float(each.memory or 0) for each in run.facts.ranks} if run.facts else {}
    peaks = {rank: float(max((each.peak or 0 for each in steps), default=0)) for rank, steps in run.ranks.items()}
    there = [(f"rank {rank}", {"held": peak}, limits.get(rank, 0.0)) for rank, peak in peaks.items() if peak]
    on_cpu = run.facts is not None and run.facts.world.device == "cpu"
    return _bars(f"Most that each {'process' if on_cpu else 'device'} held", there) if there else None


def _predicted(run: Run) -> MemoryBarGroup | None:
    predicted = run.facts.predicted.memory if run.facts and run.facts.predicted else ()
    several = len(predicted) > 1
    there = []
    for place, each in enumerate(predicted):
        kinds = {name: value for name, value in each.items() if name != "limit" and value > 0}
        there.append((f"place {place}" if several else "each", kinds, each.get("limit", 0.0)))
    where = ", by place along the stage axis" if several else ""
    return _bars(f"As predicted{where}", there) if any(kinds for _, kinds, _ in there) else None


def _bars(title: str, there: Sequence[tuple[str, Mapping[str, float], float]]) -> MemoryBarGroup:
    """Return bars on one scale, which fits the fullest and every limit: a bar shows its share of its limit."""
    widest = 1.02 * max(max(sum(kinds.values()), limit) for _, kinds, limit in there)
    held = []
    for name, kinds, limit in there[:MOST_BARS]:
        total = sum(kinds.values())
        words = f"{formatting.size(total)} of {formatting.size(limit)}" if limit else formatting.size(total)
        line = 100 * limit / widest if limit else None
        held.append(MemoryBar(name, words, stacked(_ordered(kinds), widest), line, bool(limit) and total > limit))
    names = dict.fromkeys(name for _, kinds, _ in there for name, _ in _ordered(kinds))
    return MemoryBarGroup(title, held, list(names), len(there) - len(held))


def _ordered(kinds: Mapping[str, float]) -> list[tuple[str, float]]:
    known = [(name, kinds[name]) for name in KINDS if name in kinds]
    return known + [(name, value) for name, value in kinds.items() if name not in KINDS]


def _modules(footprint: Footprint | None) -> HtmlTable | None:
    if footprint is None or not footprint.modules:
        return None
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    found = _by_module(footprint.each or (footprint,))
    ordered = sorted(found, key=lambda module: (-_total(module), module.name))[:MOST_MODULES]
    unit, scale = formatting.unit_for(_total(ordered[0]))
    several = len(set(found.values())) > 1
    rows = [
        (
            module.name or "(the model itself)",
            *((ranks_in_words(found[module]),) if several else ()),
            *(formatting.amount(getattr(module, kind), scale) for kind in kinds),
            formatting.amount(_total(module), scale),
        )
        for module in ordered
    ]
    left = len(found) - len(ordered)
    caption = f"Modules by what they hold, {unit}{f'; {left} smaller ones are left out' if left else ''}"
    head = ("module", *(("on",) if several else ()), *kinds, "in all")
    return HtmlTable(caption, head, rows, tuple(range(1 + several, 7 + several)))


def _by_module(every: Sequence[Footprint]) -> dict[ModuleBytes, tuple[int, ...]]:
    """Return the ranks on which each module holds the same bytes."""
    found: dict[ModuleBytes, list[int]] = {}
    for one in every:
        for module in one.modules:
            found.setdefault(module, []).extend(one.ranks or (0,))
    return {module: tuple(sorted(ranks)) for module, ranks in found.items()}


def _total(module: ModuleBytes) -> int:
    return module.parameters + module.gradients + module.optimizer + module.activations + module.buffers


def _savings(footprint: Footprint | None) -> HtmlTable | None:
    if footprint is None or not footprint.savings:
        return None
    rows = [
        (
            each.what,
            formatting.size(each.bytes),
            formatting.percent(each.bytes / footprint.peak) if footprint.peak else "",
        )
        for each in sorted(footprint.savings, key=lambda each: -each.bytes)
    ]
    return HtmlTable("What would lower the peak", ("means", "lower by", "of the peak"), rows, (1, 2))
