"""``echelon plan --compare A B``: two saved plans side by side, and where their predicted seconds and bytes differ."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.base import formatting
from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.prediction import PARTS
from echelon.plan.saved_plan import SavedPlan, SavedPrediction
from echelon.tools.plan_report.plan_tables import HELD, MEANING, TitledTable, print_tables, text_of

VERSION = 1
#: Fraction of a step below which two predictions are treated as equal.
EQUAL = 0.0005
#: Options stored in a saved plan that change its prediction in addition to the draft.
COMPARED_OPTIONS = ("optimizer", "memory", "allow", "bench")
FEW = 8  # most entries of a list that are shown


@dataclass(frozen=True)
class PlanDifference:
    """One figure of both plans, in seconds or bytes."""

    what: str
    first: float
    second: float

    @property
    def change(self) -> float:
        return self.second - self.first


@dataclass(frozen=True)
class PlanComparison:
    """Two plans and the differences between them.

    names:     short names of both files, used as column headings
    decisions: (field, first, second) for each field of the drafts, or option, that differs
    parts:     predicted seconds by part, per step, or per sample if the batches differ
    memory:    predicted bytes by kind, on the fullest device of each plan
    notes:     reasons why the comparison is not exact, one line each
    """

    names: tuple[str, str]
    plans: tuple[SavedPlan, SavedPlan]
    decisions: tuple[tuple[str, str, str], ...]
    parts: tuple[PlanDifference, ...]
    memory: tuple[PlanDifference, ...]
    notes: tuple[str, ...]

    @property
    def by_sample(self) -> bool:
        first, second = self.plans
        return first.draft.batch != second.draft.batch

    @property
    def seconds(self) -> PlanDifference | None:
        """The sum of ``parts``; None if one of the plans has no prediction."""
        found = [_per(plan, plan.predicted.seconds, self.by_sample) for plan in self.plans if plan.predicted]
        return PlanDifference("in all", *found) if len(found) == 2 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the data that ``--json`` prints: seconds, bytes, and the fields of both drafts."""
        return {
            "version": VERSION,
            "plans": [_plan_data(name, plan) for name, plan in zip(self.names, self.plans, strict=True)],
            "decisions": {what: [first, second] for what, first, second in self.decisions},
            "per": "sample" if self.by_sample else "step",
            "seconds": _figures([self.seconds] if self.seconds else []),
            "parts": _figures(self.parts),
            "memory": _figures(self.memory),
            "notes": list(self.notes),
            "sentence": sentence(self),
        }


def compare_files(paths: tuple[str, str], beside: Sequence[str], as_json: bool) -> None:
    """Print the comparison of two saved plans.

    paths:    files of the two plans
    beside:   other options that were given; ``--compare`` takes none of them, so UsageError is raised if there are any
    as_json:  print JSON instead of tables
    """
    if beside:
        raise UsageError(
            f"--compare {' '.join(paths)}: compares two saved plans and takes --json alone beside them; "
            f"leave out {', '.join(beside)}"
        )
    first, second = (SavedPlan.load(path) for path in paths)
    comparison = compare(first, second, _short_names(*paths))
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=1))
    elif sys.stdout.isatty():
        print_tables(headline(comparison), sections(comparison))
    else:
        print(text_of(headline(comparison), sections(comparison)))


def compare(first: SavedPlan, second: SavedPlan, names: tuple[str, str]) -> PlanComparison:
    """Return the differences between two plans."""
    by_sample = first.draft.batch != second.draft.batch
    before, after = first.predicted, second.predicted
    parts = tuple(_parts(first, second, by_sample)) if before and after else ()
    memory = tuple(_memory(before, after)) if before and after else ()
    notes = tuple(_notes(first, second, names))
    return PlanComparison(names, (first, second), tuple(_decisions(first, second)), parts, memory, notes)


def _short_names(first: str, second: str) -> tuple[str, str]:
    names = Path(first).name, Path(second).name
    return names if names[0] != names[1] else (first, second)


# ---- differences ----


def _decisions(first: SavedPlan, second: SavedPlan) -> Iterator[tuple[str, str, str]]:
    for field in dataclasses.fields(Draft):
        one, other = getattr(first.draft, field.name), getattr(second.draft, field.name)
        if one != other:
            yield field.name, _in_words(one), _in_words(other)
    for name in COMPARED_OPTIONS:
        one, other = first.made_from.get(name), second.made_from.get(name)
        if one != other:
            yield name, _in_words(one), _in_words(other)


def _in_words(value: Any) -> str:
    """Return a decision as the text of a cell: ``no``, ``8``, ``in 3 of 8 stages``, ``2, 4, 7``."""
    if value is None or value is False or value in ((), []):
        return "no"
    if value is True:
        return "yes"
    if not isinstance(value, tuple | list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if all(isinstance(entry, bool) for entry in value):
        return "everywhere" if all(value) else f"in {sum(value)} of {len(value)} stages"
    shown = ", ".join(map(_in_words, value[:FEW]))
    return shown if len(value) <= FEW else f"{shown}, ... ({len(value)} in all)"


def _parts(first: SavedPlan, second: SavedPlan, by_sample: bool) -> Iterator[PlanDifference]:
    assert first.predicted
    assert second.predicted
    before, after = first.predicted.parts, second.predicted.parts
    for part in dict.fromkeys((*PARTS, *before, *after)):
        one = _per(first, before.get(part, 0.0), by_sample)
        other = _per(second, after.get(part, 0.0), by_sample)
        if one or other:
            yield PlanDifference(part, one, other)


def _per(plan: SavedPlan, seconds: float, by_sample: bool) -> float:
    return seconds / plan.draft.batch if by_sample else seconds


def _memory(before: SavedPrediction, after: SavedPrediction) -> Iterator[PlanDifference]:
    kinds = _fullest(before), _fullest(after)
    for kind in dict.fromkeys((*HELD, *kinds[0], *kinds[1])):
        one, other = (found.get(kind, 0.0) for found in kinds)
        if one or other:
            yield PlanDifference(kind, one, other)
    yield PlanDifference("in all", *(max(each.memory, default=0.0) for each in (before, after)))


def _fullest(predicted: SavedPrediction) -> Mapping[str, float]:
    """Return the bytes by kind of the fullest device."""
    return max(predicted.kinds, key=lambda kinds: sum(kinds.values()), default={})


def _notes(first: SavedPlan, second: SavedPlan, names: tuple[str, str]) -> Iterator[str]:
    difference = _model_difference(first, second)
    if difference:
        yield f"the plans are for different models ({difference}): their seconds are for different work"
    if first.cluster != second.cluster:
        yield f"the plans are for different machines: {first.cluster or 'unknown'} and {second.cluster or 'unknown'}"
    if first.draft.batch != second.draft.batch:
        yield f"the batches differ ({first.draft.batch:,} and {second.draft.batch:,}): seconds are for each sample"
    if first.created_by != second.created_by:
        yield f"the predictions are those of {first.created_by or 'an unknown version'} and {second.created_by}"
    for name, plan in zip(names, (first, second), strict=True):
        if plan.predicted is None:
            yield f"{name} was saved without a prediction, so only decisions are compared"


def _model_difference(first: SavedPlan, second: SavedPlan) -> str:
    if first.name != second.name:
        return f"{first.name or 'unknown'} and {second.name or 'unknown'}"
    if first.model and second.model:
        for name in dict.fromkeys((*first.model, *second.model)):
            one, other = first.model.get(name), second.model.get(name)
            if one != other:
                return f"parameter '{name}' is {_shape(one)} and {_shape(other)}"
    return "" if len(first.units) == len(second.units) else f"{len(first.units)} and {len(second.units)} units"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


# ---- text ----


def headline(comparison: PlanComparison) -> list[str]:
    """Return one line for each plan, then the summary sentence."""
    lines = [
        f"{name}: {plan.draft}; {plan.name or 'a model'} on {plan.cluster or 'unknown machines'}"
        for name, plan in zip(comparison.names, comparison.plans, strict=True)
    ]
    return [*lines, sentence(comparison)]


def sentence(comparison: PlanComparison) -> str:
    """Return a sentence: which plan is faster, by how much, and which parts of a step cause most of the difference."""
    whole, names = comparison.seconds, comparison.names
    if whole is None:
        return "seconds cannot be compared: a prediction is missing"
    per = "a sample" if comparison.by_sample else "a step"
    if abs(whole.change) < EQUAL * whole.first:
        same = "; the plans are the same" if not comparison.decisions and not comparison.notes else ""
        return f"both take {formatting.duration(whole.first)} {per}{same}"
    quicker, slower = (names[1], names[0]) if whole.change < 0 else (names[0], names[1])
    less = abs(whole.change) / max(whole.first, whole.second)
    shorter, longer = sorted((whole.first, whole.second))
    times = f"{formatting.duration(shorter)} against {formatting.duration(longer)}"
    return f"{quicker} takes {less:.1%} less than {slower} ({times} {per}): {_most(comparison, whole.change)}"


def _most(comparison: PlanComparison, change: float) -> str:
    """Name the part that saves most time in the faster plan, and the part that costs it most extra time."""
    sign = 1 if change < 0 else -1  # sign * part.change < 0: the faster plan saves time in this part
    saved = max(comparison.parts, key=lambda part: -sign * part.change)
    lost = max(comparison.parts, key=lambda part: sign * part.change)
    words = f"{formatting.duration(abs(saved.change))} less for {_called(saved)}"
    if sign * lost.change > EQUAL * abs(change):
        words += f", but {formatting.duration(abs(lost.change))} more for {_called(lost)}"
    return words


def _called(part: PlanDifference) -> str:
    meaning = MEANING.get(part.what)
    return f"{part.what} ({meaning})" if meaning else part.what


def sections(comparison: PlanComparison) -> list[TitledTable]:
    """Return the tables: decisions that differ, seconds by part, bytes by kind, and notes."""
    names, whole = comparison.names, comparison.seconds
    found = [TitledTable("Decisions that differ", list(comparison.decisions), ("", *names))]
    if whole is not None:
        what = "for each sample" if comparison.by_sample else "of a step"
        head = ("", *names, "difference", "of all", "")
        rows = [_time_row(each, whole.first) for each in (*comparison.parts, whole)]
        found.append(TitledTable(f"Predicted time {what}", rows, head, (1, 2, 3, 4)))
    if comparison.memory:
        unit, scale = formatting.unit_for(max(max(each.first, each.second) for each in comparison.memory))
        rows = [_memory_row(each, scale) for each in comparison.memory]
        found.append(
            TitledTable(f"Predicted memory of the fullest device, {unit}", rows, ("", *names, "difference"), (1, 2, 3))
        )
    found.append(TitledTable("To know", [(note,) for note in comparison.notes]))
    return [section for section in found if section.rows]


def _time_row(each: PlanDifference, whole: float) -> tuple[str, ...]:
    sign = "+" if each.change > 0 else "-" if each.change < 0 else ""
    change = f"{sign}{formatting.duration(abs(each.change))}"
    share = formatting.percent(each.change / whole, signed=True)
    return (
        each.what,
        formatting.duration(each.first),
        formatting.duration(each.second),
        change,
        share,
        MEANING.get(each.what, ""),
    )


def _memory_row(each: PlanDifference, scale: float) -> tuple[str, ...]:
    sign = "+" if each.change > 0 else "-" if each.change < 0 else ""
    shown = (formatting.amount(value, scale) for value in (each.first, each.second))
    return (each.what, *shown, f"{sign}{formatting.amount(abs(each.change), scale)}")


# ---- data for JSON ----


def _plan_data(name: str, plan: SavedPlan) -> dict[str, Any]:
    seconds = plan.predicted.seconds if plan.predicted else None
    return {
        "file": name,
        "words": str(plan.draft),
        "model": plan.name,
        "cluster": plan.cluster,
        "seconds": seconds,
        "samples_per_second": plan.draft.batch / seconds if seconds else None,
        "limit": plan.predicted.limit if plan.predicted else None,
        "draft": dataclasses.asdict(plan.draft),
    }


def _figures(differences: Sequence[PlanDifference]) -> dict[str, dict[str, float]]:
    return {each.what: {"first": each.first, "second": each.second, "change": each.change} for each in differences}
