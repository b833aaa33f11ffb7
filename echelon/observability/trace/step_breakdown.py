"""Breaks a rank's step down into parts that add up to the step: every moment counts once.

On a CPU the parts come from the host's phases and waits. On a GPU the device's kernels take precedence over waits of
the host; the host's activity counts only while the device is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.observability.trace.intervals import Interval, length, union, within, without
from echelon.observability.trace.span import DEVICE, HOST, Span
from echelon.observability.trace.trace_files import RankTrace

PARTS = ("compute", "exposed", "bubble", "data", "server", "update", "other")
#: Calls between two steps whose time is no part of a step.
APART = ("save", "evaluate")
#: Part of each phase of the host, unless a wait overrides it.
_PHASES = {
    "forward": "compute",
    "backward": "compute",
    "communicate": "exposed",
    "update": "update",
    "data": "data",
}


@dataclass
class StepBreakdown:
    """A step on one rank, with its parts as time intervals."""

    rank: int
    number: int
    begin: float
    end: float
    parts: dict[str, list[Interval]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def part(self, name: str) -> float:
        return length(self.parts.get(name, []))

    @property
    def own(self) -> float:
        """The seconds of the rank's own work: the step without waits for other ranks and servers."""
        return self.seconds - self.part("exposed") - self.part("bubble") - self.part("server")


Windows = dict[tuple[int, int], Interval]  #: time window of the pipeline, by rank and step


def steps_of(ranked: RankTrace, windows: Windows) -> list[StepBreakdown]:
    """Return the steps of a rank. While its pipeline runs, any exposed communication counts as bubble."""
    host = [span for span in ranked.spans if span.lane == HOST]
    device = [span for span in ranked.spans if span.lane == DEVICE]
    layers = _layers(host, device, alone=ranked.about.get("ranks") == 1)
    found = []
    for number, (begin, end) in _bounds(host, device).items():
        step = StepBreakdown(ranked.rank, number, begin, end)
        left = [(begin, end)]
        for part, intervals in layers:
            taken = within(left, intervals)
            if part == "exposed" and (ranked.rank, number) in windows:
                inside = within(taken, [windows[ranked.rank, number]])
                _add(step, "bubble", inside)
                _add(step, part, without(taken, inside))
            else:
                _add(step, part, taken)
            left = without(left, taken)
        _add(step, "other", left)
        found.append(step)
    return found


def _add(step: StepBreakdown, part: str, intervals: Sequence[Interval]) -> None:
    if intervals:
        step.parts[part] = union([*step.parts.get(part, []), *intervals])


def _bounds(host: Sequence[Span], device: Sequence[Span]) -> dict[int, Interval]:
    """Return begin and end of each step.

    On a CPU these are those of the host's phases. On a GPU a step lasts from the end of the previous step to the end
    of the last kernel that the step launched.
    """
    phases: defaultdict[int, list[Span]] = defaultdict(list)
    for span in host:
        if "phase" in span.more:
            phases[span.step].append(span)
    bounds = {step: (min(s.begin for s in own), max(s.end for s in own)) for step, own in sorted(phases.items())}
    ends: defaultdict[int, float] = defaultdict(float)
    for span in device:
        ends[span.step] = max(ends[span.step], span.end)
    since = min((begin for begin, _ in bounds.values()), default=0.0)
    for step, (_, end) in bounds.items() if device else ():
        bounds[step] = since, max(ends.get(step, end), since)
        since = bounds[step][1]
    return bounds


def _layers(host: Sequence[Span], device: Sequence[Span], *, alone: bool) -> list[tuple[str, list[Interval]]]:
    """Return the parts with their intervals, in order of precedence."""
    kernels = [span for span in device if span.kind == "kernel" and "copy" not in span.more]
    copies = [span for span in device if "copy" in span.more]
    layers = [
        ("update", [span for span in kernels if span.more.get("in") == "update"]),
        ("compute", kernels),
        ("exposed", [span for span in device if span.kind == "communicate"]),
        ("other", [span for span in host if span.name in APART]),  # with its waits, which no step has
        ("bubble", [span for span in host if span.kind == "bubble"]),
        ("exposed", [span for span in host if span.kind == "wait"]),
        ("server", [span for span in host if span.kind in ("pull", "push")]),
        ("data", [span for span in host if span.kind == "data" and "phase" not in span.more]),
        ("compute", copies),
        ("other", [span for span in host if span.kind == "other"]),
    ]
    if not device:  # while a GPU is idle, the host is only too slow for it, so its phases are not work
        layers += _of_phases(host, alone=alone)
    return [(part, union((span.begin, span.end) for span in spans)) for part, spans in layers]


def _of_phases(host: Sequence[Span], *, alone: bool) -> list[tuple[str, list[Span]]]:
    """Return the host's phases by part. If waits for the loader are known, other time between steps is user code."""
    loaded = any(span.name == "wait for a batch" for span in host)
    meaning = _PHASES | ({"data": "other"} if loaded else {}) | ({"communicate": "other"} if alone else {})
    phases = [span for span in host if "phase" in span.more]
    return [(meaning[name], [span for span in phases if span.name == name]) for name in _PHASES]
