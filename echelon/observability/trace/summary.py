"""``Summary``: the figures of a trace, such as step parts per rank, communication, bubble and MFU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from echelon.observability.runlog.log_files import RUN
from echelon.observability.runlog.tolerant_json import json_file, number
from echelon.observability.trace.bubble import find_bubble
from echelon.observability.trace.intervals import clipped, length, union
from echelon.observability.trace.step_breakdown import PARTS, StepBreakdown, steps_of
from echelon.observability.trace.trace_files import RankTrace
from echelon.observability.trace.traffic import (
    MatchedComm,
    lateness,
    messages_of,
    table,
    transfers,
    wait_seconds_by_culprit,
)


@dataclass(frozen=True)
class Summary:
    """The summary of a trace. ``figures`` is the content of summary.json:

    steps, step_ms:        first and last step; median time of a step
    ranks:                 milliseconds per step of each rank: the parts, which add up to step_ms; communicate_ms is
                           all communication, exposed_ms the part of it that does not overlap with compute, and
                           late_ms the part of that spent waiting for late ranks
    slowest, slowest_ms:   rank with the most own work, and its excess over the mean of the others
    waited_for:            rank that others waited for most, and the milliseconds per step, summed over all of them
    exposed_communication: share of the time of all ranks
    bubble:                measured, simulated (theory), and for even stages; null without a pipeline
    mfu:                   FLOPs of the model over the nominal peak of the devices; null if either is unknown
    communication:         bytes, milliseconds and GB/s per step on a participating rank
    clock_error_ms:        largest error of a rank's clock
    cut:                   null, or the end of a trace that did not reach its last step: see ``find_truncation``

    aside: directory with the partial files of an earlier attempt; None without any
    """

    figures: dict[str, Any]
    trace: Path | None = None
    aside: Path | None = None

    def lines(self) -> list[str]:
        from echelon.observability.trace.summary_text import short_lines

        return short_lines(self)


def summarize(ranks: Sequence[RankTrace], flops: float | None = None) -> dict[str, Any]:
    """Return the figures of a trace.

    flops: FLOPs of one step of the whole job; None to use the counts of the ranks, if they have any
    """
    bubble, windows = find_bubble(ranks)
    by_rank = {ranked.rank: steps_of(ranked, windows) for ranked in ranks}
    steps = [step for own in by_rank.values() for step in own]
    if not steps:
        return {"steps": [0, 0], "step_ms": 0.0, "ranks": [], "communication": []}
    messages = messages_of(ranks)
    late = lateness(messages)
    numbers = [step.number for step in steps]
    seconds = median(step.seconds for step in steps)
    count = len(set(numbers))
    return {
        "steps": [min(numbers), max(numbers)],
        "step_ms": 1e3 * seconds,
        "ranks": [_rank(rank, own, messages, late) for rank, own in by_rank.items() if own],
        **_slowest({rank: fmean(step.own for step in own) for rank, own in by_rank.items() if own}),
        "waited_for": _waited_for(wait_seconds_by_culprit(late), count),
        "exposed_communication": sum(s.part("exposed") for s in steps) / sum(s.seconds for s in steps),
        "bubble": bubble.to_json() if bubble else None,
        "mfu": _mfu(ranks, seconds, flops),
        "communication": table(messages, ranks, count),
        "clock_error_ms": _clock_error(ranks),
    }


def _rank(
    rank: int, steps: Sequence[StepBreakdown], messages: Sequence[MatchedComm], late: dict[tuple[int, int], float]
) -> dict[str, float | int]:
    own = union(transfers(messages).get(rank, []))
    travelling = [union([*clipped(own, s.begin, s.end), *s.parts.get("exposed", [])]) for s in steps]
    figures: dict[str, float | int] = {"rank": rank, "step_ms": 1e3 * fmean(step.seconds for step in steps)}
    figures |= {f"{part}_ms": 1e3 * fmean(step.part(part) for step in steps) for part in PARTS}
    figures["communicate_ms"] = 1e3 * fmean(length(each) for each in travelling)
    figures["late_ms"] = 1e3 * sum(value for (who, _), value in late.items() if who == rank) / len(steps)
    return figures


def _slowest(own: dict[int, float]) -> dict[str, Any]:
    slowest = max(own, key=lambda rank: own[rank])
    others = [seconds for rank, seconds in own.items() if rank != slowest]
    return {"slowest": slowest, "slowest_ms": 1e3 * (own[slowest] - fmean(others)) if others else None}


def _waited_for(blame: dict[int, float], steps: int) -> dict[str, float | int] | None:
    if not blame:
        return None
    rank = max(blame, key=lambda one: blame[one])
    return {"rank": rank, "ms": 1e3 * blame[rank] / steps}


def _mfu(ranks: Sequence[RankTrace], seconds: float, flops: float | None) -> float | None:
    peaks = [ranked.about.get("peak") for ranked in ranks]
    counted = [ranked.about.get("flops") for ranked in ranks]
    if flops is None and all(isinstance(one, int | float) for one in counted):
        flops = float(sum(one for one in counted if one is not None))
    if not flops or not seconds or not all(isinstance(peak, int | float) and peak > 0 for peak in peaks):
        return None
    promised = sum(float(peak) / sharers for peak, sharers in zip(peaks, _sharers(ranks), strict=True) if peak)
    return flops / (seconds * promised)


def _sharers(ranks: Sequence[RankTrace]) -> list[int]:
    """Return, for each rank, the number of ranks that use its device."""
    devices = [(ranked.about.get("host"), ranked.about.get("device_index", ranked.rank)) for ranked in ranks]
    return [devices.count(device) for device in devices]


def _clock_error(ranks: Sequence[RankTrace]) -> float | None:
    errors = [ranked.about.get("clock_error") for ranked in ranks]
    known = [1e3 * error for error in errors if isinstance(error, int | float)]
    return max(known) if len(known) == len(ranks) else None


def read_flops(directory: Path) -> float | None:
    """Return the FLOPs of one step from run.json; None if unknown."""
    stored = number(json_file(directory / RUN) or {}, "flops_per_step")
    return stored if stored is not None and stored > 0 else None
