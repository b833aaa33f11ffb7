"""Sections about a step's time: its parts, the summary of the timeline, and the comparison with the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from echelon.base import formatting
from echelon.observability.runlog.run_metadata import PredictionMetadata
from echelon.observability.runlog.run_reader import Run
from echelon.observability.runlog.tolerant_json import JSON, an_object, integer, integers, number, objects, text
from echelon.observability.trace.truncated_text import headline
from echelon.tools.html.bars import BarSegment, stacked
from echelon.tools.report.run_files import RunFiles
from echelon.tools.report.sections.html_table import HtmlTable
from echelon.tools.report.sections.phases import BOTH, MEANING, mean_phases, parts

#: Headings for the columns of the timeline's summary.
COLUMNS = {
    "compute_ms": "computing",
    "communicate_ms": "communicating",
    "exposed_ms": "of it exposed",
    "bubble_ms": "bubble",
    "data_ms": "data",
    "server_ms": "servers",
    "update_ms": "update",
    "other_ms": "other",
}
#: Largest number of rows in the table of messages.
MOST_MESSAGES = 20
#: Parts of a prediction that belong to one measured phase. Messages inside a pass belong to the pass.
PREDICTED_IN = {
    "forward and backward": ("compute", "recompute", "bubble", "split", "pipeline", "parameters", "batch norm"),
    "communicate": ("gradients",),
    "update": ("update",),
    "data": ("host",),
}
MEASURED_IN = {"forward and backward": ("forward", "backward")}


@dataclass(frozen=True)
class StepTimeSection:
    """The mean time of a step by part.

    seconds: time of a step
    bars:    parts of a step, in seconds
    table:   the same as numbers
    """

    seconds: float
    bars: list[BarSegment]
    table: HtmlTable


def times(run: Run) -> StepTimeSection | None:
    phases = mean_phases([each.phases for each in run.steps if each.phases])
    there = [(name, value / 1e3) for name, value in parts(phases)]
    if not there:
        return None
    bars = stacked(there)
    means = MEANING if any(bar.name == "forward" for bar in bars) else MEANING | {"backward": BOTH}
    rows = [
        (bar.name, formatting.duration(bar.value), formatting.percent(bar.width / 100), means[bar.name]) for bar in bars
    ]
    head = ("part", "time", "of the step", "what it is")
    return StepTimeSection(sum(bar.value for bar in bars), bars, HtmlTable("A step's time by part", head, rows, (1, 2)))


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
        yield f"{_which(steps)} took {formatting.duration(took / 1e3)}{_of(steps)}."
    several = len(objects(found, "ranks")) > 1
    if several and (exposed := number(found, "exposed_communication")) is not None:
        yield f"{formatting.percent(exposed)} of a step is communication that computing does not hide."
    bubble = an_object(found, "bubble")
    if (share := number(bubble, "measured")) is not None:
        theory = number(bubble, "theory")
        against = f"; the schedule alone makes {formatting.percent(theory)}" if theory is not None else ""
        yield f"The pipeline's bubble is {formatting.percent(share)} of the time that its stages are at work{against}."
    if (used := number(found, "mfu")) is not None:
        yield f"{formatting.percent(used)} of the devices' peak arithmetic is used (MFU)."


def _which(steps: tuple[int, ...]) -> str:
    return f"Step {steps[0]:,}" if len(set(steps)) == 1 else "A step"


def _of(steps: tuple[int, ...]) -> str:
    return f" (median of steps {steps[0]:,} to {steps[1]:,})" if len(steps) == 2 and len(set(steps)) > 1 else ""


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
    there = [name for name in COLUMNS if any(number(each, name) for each in ranks)]
    if not there:
        return None
    rows = [
        (str(integer(each, "rank")), *(formatting.amount(number(each, name) or 0.0, 1.0) for name in there))
        for each in ranks
    ]
    slowest = integer(found, "slowest") if len(ranks) > 1 else None
    marked = next((place for place, each in enumerate(ranks) if integer(each, "rank") == slowest), None)
    head = ("rank", *(COLUMNS[name] for name in there))
    return HtmlTable("Milliseconds a step by rank, from the timeline", head, rows, tuple(range(len(head))), marked)


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
        found.append(_compare("a step", _ms(foretold.predicted_step_ms), _ms(foretold.measured_step_ms), "time"))
    elif predicted is not None:
        found.append(_compare("a step", predicted.seconds, _median_step(run), "time"))
    if predicted is not None:
        found += _parts(predicted, run)
    if foretold is not None:
        found.append(_compare("memory, rank 0", foretold.predicted_memory, foretold.measured_memory, "memory"))
    return [each for each in found if each is not None]


def _ms(value: float | None) -> float | None:
    return None if value is None else value / 1e3


def _median_step(run: Run) -> float | None:
    took = [sum(each.phases.values()) / 1e3 for each in run.steps[1:] or run.steps if each.phases]
    return median(took) if took else None


def _parts(predicted: PredictionMetadata, run: Run) -> Iterator[PredictionComparison | None]:
    phases = mean_phases([each.phases for each in run.steps if each.phases])
    for name, causes in PREDICTED_IN.items():
        expected = sum(predicted.parts.get(cause, 0.0) for cause in causes)
        came = sum(phases.get(phase, 0.0) for phase in MEASURED_IN.get(name, (name,))) / 1e3
        if expected or came:
            yield _compare(name, expected, came, "time")


def _compare(what: str, expected: float | None, came: float | None, kind: str) -> PredictionComparison | None:
    if expected is None or came is None or expected < 0 or came < 0:
        return None
    show = formatting.duration if kind == "time" else formatting.size
    most = max(expected, came) or 1.0
    off = came / expected - 1 if expected else 0.0
    against = formatting.percent(off, signed=True) if expected else ""
    return PredictionComparison(
        what, show(expected), show(came), against, off, (100 * expected / most, 100 * came / most)
    )
