"""Sections about a step's time: its parts, the summary of the timeline, and the comparison with the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.base import formatting
from echelon.observability.runlog.run_metadata import PredictionMetadata
from echelon.observability.runlog.run_reader import Run, StepRecord
from echelon.observability.runlog.tolerant_json import JSON, an_object, integer, integers, number, objects, text
from echelon.observability.trace.summary_text import COLUMNS
from echelon.observability.trace.truncated_text import headline
from echelon.tools.html.bars import BarSegment, stacked
from echelon.tools.report.run_files import RunFiles
from echelon.tools.report.sections.html_table import HtmlTable
from echelon.tools.report.sections.overview import in_words
from echelon.tools.report.sections.phases import BOTH, INSIDE, MEANING, median_phases, median_step
from echelon.tools.report.sections.rank_section import OUT

#: Largest number of rows in the table of messages.
MOST_MESSAGES = 20
#: Parts of a prediction that belong to one measured phase.
PREDICTED_IN = {
    "forward and backward": ("compute", "recompute"),
    "communicate": ("bubble", "split", "pipeline", "parameters", "batch norm", "gradients"),
    "update": ("update",),
    "data": ("host",),
}
#: The same on a GPU, whose phases contain the messages inside them.
PREDICTED_ON_GPU = PREDICTED_IN | {
    "forward and backward": (*PREDICTED_IN["forward and backward"], *PREDICTED_IN["communicate"][:-1]),
    "communicate": ("gradients",),
}
MEASURED_IN = {"forward and backward": ("forward", "backward")}


@dataclass(frozen=True)
class StepTimeSection:
    """The time of rank 0 by part, from the first record to the last.

    words: the steps that the figures cover, and the median step
    bars:  parts, in seconds
    table: the same as numbers
    """

    words: str
    bars: list[BarSegment]
    table: HtmlTable


def times(run: Run) -> StepTimeSection | None:
    records = [each for each in run.steps if each.phases]
    spent = _spent(records)
    if not spent:
        return None
    bars, steps = stacked(list(spent.items())), [each.phases for each in records]
    medians, means = median_phases(steps), _meaning(run, spent)
    rows = [
        (
            bar.name,
            formatting.duration(bar.value),
            formatting.percent(bar.width / 100),
            formatting.duration(medians[bar.name] / 1e3) if bar.name in medians else "",
            means[bar.name],
        )
        for bar in bars
    ]
    first, last = (records[1:] or records)[0], records[-1]
    since = f"Steps {first.step - _stride(records) + 1:,} to {last.step:,} took rank 0 {in_words(sum(spent.values()))}"
    words = f"{since}. One step takes {formatting.duration((median_step(steps) or 0.0) / 1e3)} (median)."
    head = ("part", "time", "share", "a step (median)", "what it is")
    return StepTimeSection(words, bars, HtmlTable("Time of rank 0 by part", head, rows, (1, 2, 3)))


def _spent(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the seconds by part in all records without the first of several, which includes the setup."""
    earlier = [None, *records[:-1]] if len(records) == 1 else records[:-1]
    found = dict.fromkeys(MEANING, 0.0)
    for before, record in zip(earlier, records[len(records) > 1 :], strict=True):
        steps = record.step if before is None else record.step - before.step
        for phase, milliseconds in record.phases.items():
            found[phase] += steps * milliseconds / 1e3
    return {phase: seconds for phase, seconds in found.items() if seconds > 0}


def _stride(records: Sequence[StepRecord]) -> int:
    """Return the number of steps in the first record that counts."""
    return records[1].step - records[0].step if len(records) > 1 else records[0].step


def _meaning(run: Run, spent: dict[str, float]) -> dict[str, str]:
    found = MEANING if "forward" in spent else MEANING | {"backward": BOTH}
    several = run.facts is not None and run.facts.world.device == "cuda" and run.facts.world.size > 1
    return found | {phase: found[phase] + INSIDE for phase in ("forward", "backward")} if several else found


# ---- the timeline ----


@dataclass(frozen=True)
class TimelineSection:
    """The summary of ``echelon timeline`` as sentences and tables."""

    lines: list[str]
    ranks: HtmlTable | None
    messages: HtmlTable | None


def summary(found: JSON) -> TimelineSection | None:
    if not found:
        return None
    made = TimelineSection(list(_sentences(found)), _by_rank(found), _messages(found))
    return made if made.lines or made.ranks or made.messages else None


def _sentences(found: JSON) -> Iterator[str]:
    steps, took = integers(found, "steps"), number(found, "step_ms")
    if (cut := _cut(found)) is not None:
        yield cut
    if took is not None:
        yield f"{_which(steps)}: {formatting.duration(took / 1e3)}{' a step (median)' if len(set(steps)) > 1 else ''}."
    several = len(objects(found, "ranks")) > 1
    if several and (exposed := number(found, "exposed_communication")) is not None:
        yield f"{formatting.percent(exposed)} of the time of all ranks in these steps is exposed communication."
    bubble = an_object(found, "bubble")
    if (share := number(bubble, "measured")) is not None:
        theory = number(bubble, "theory")
        against = f"; the schedule alone makes {formatting.percent(theory)}" if theory is not None else ""
        yield f"The pipeline's bubble is {formatting.percent(share)} of the time that its stages are at work{against}."
    if (used := number(found, "mfu")) is not None:
        yield f"{formatting.percent(used)} of the devices' peak arithmetic is used (MFU)."


def _which(steps: tuple[int, ...]) -> str:
    if not steps:
        return "Recorded steps"
    return f"Step {steps[0]:,}" if len(set(steps)) == 1 else f"Steps {steps[0]:,} to {steps[-1]:,}"


def _cut(found: JSON) -> str | None:
    """Return a sentence about a recording that ended before its last step; None if it did not, or is damaged."""
    cut = an_object(found, "cut")
    try:
        words = headline(cut) if cut else ""
    except (KeyError, TypeError, ValueError):  # damaged
        return None
    return f"{words[0].upper()}{words[1:]}." if words else None


def _by_rank(found: JSON) -> HtmlTable | None:
    ranks = objects(found, "ranks")
    there = [name for name in COLUMNS if any(number(each, name) for each in ranks)]  # without empty ones
    if not there:
        return None
    rows = [
        (str(integer(each, "rank")), *(formatting.amount(number(each, name) or 0.0, 1.0) for name in there))
        for each in ranks
    ]
    marked = next((place for place, each in enumerate(ranks) if _stands_out(each, found)), None)
    head = ("rank", *(COLUMNS[name] for name in there))
    return HtmlTable("Milliseconds a step by rank", head, rows, tuple(range(len(head))), marked)


def _stands_out(rank: JSON, found: JSON) -> bool:
    """Return True for the slowest rank, if its own work exceeds that of the others as much as ``rank_section`` asks."""
    over, step = number(found, "slowest_ms"), number(rank, "step_ms")
    if over is None or step is None or integer(rank, "rank") != integer(found, "slowest"):
        return False
    own = step - sum(number(rank, f"{part}_ms") or 0.0 for part in ("exposed", "bubble", "server"))
    return over > OUT * (own - over)


def _messages(found: JSON) -> HtmlTable | None:
    messages = sorted(objects(found, "communication"), key=lambda each: -(number(each, "ms") or 0.0))
    rows = [
        (
            text(each, "name"),
            formatting.size(number(each, "bytes") or 0.0),
            formatting.duration((number(each, "ms") or 0.0) / 1e3),
            "" if (speed := number(each, "gb_per_s")) is None else f"{speed:.3g} GB/s",
        )
        for each in messages[:MOST_MESSAGES]
    ]
    return HtmlTable("Messages of a step", ("message", "size", "time", "speed"), rows, (1, 2, 3)) if rows else None


# ---- predicted against measured ----


@dataclass(frozen=True)
class PredictionComparison:
    """A predicted and a measured value.

    against: relative error of the prediction, as text
    off:     measured / predicted - 1
    widths:  widths of the two bars, in percent of the wider one
    """

    what: str
    predicted: str
    measured: str
    against: str
    off: float
    widths: tuple[float, float]


def compared(gathered: RunFiles) -> list[PredictionComparison]:
    """Return comparisons for the time of a step, its parts, and memory; empty if nothing was predicted."""
    run = gathered.run
    foretold, predicted = run.foretold, run.facts.predicted if run.facts else None
    found: list[PredictionComparison | None] = []
    if foretold is not None:
        what = f"a step, mean of 15 until step {foretold.step}"
        found.append(_compare(what, _ms(foretold.predicted_step_ms), _ms(foretold.measured_step_ms), "time"))
    elif predicted is not None:
        measured = median_step([each.phases for each in run.steps])
        found.append(_compare("a step (median)", predicted.seconds, _ms(measured), "time"))
    if predicted is not None:
        found += _parts(predicted, run)
    if foretold is not None:
        found.append(_compare("memory, rank 0", foretold.predicted_memory, foretold.measured_memory, "memory"))
    return [each for each in found if each is not None]


def _ms(value: float | None) -> float | None:
    return None if value is None else value / 1e3


def _parts(predicted: PredictionMetadata, run: Run) -> Iterator[PredictionComparison | None]:
    phases = median_phases([each.phases for each in run.steps])
    on_gpu = run.facts is not None and run.facts.world.device == "cuda"
    for name, causes in (PREDICTED_ON_GPU if on_gpu else PREDICTED_IN).items():
        expected = sum(predicted.parts.get(cause, 0.0) for cause in causes)
        measured = sum(phases.get(phase, 0.0) for phase in MEASURED_IN.get(name, (name,))) / 1e3
        if expected or measured:
            yield _compare(name, expected, measured, "time")


def _compare(what: str, expected: float | None, measured: float | None, kind: str) -> PredictionComparison | None:
    if expected is None or measured is None or expected < 0 or measured < 0:
        return None
    show = formatting.duration if kind == "time" else formatting.size
    most = max(expected, measured) or 1.0
    off = measured / expected - 1 if expected else 0.0
    against = formatting.percent(off, signed=True) if expected else ""
    return PredictionComparison(
        what, show(expected), show(measured), against, off, (100 * expected / most, 100 * measured / most)
    )
