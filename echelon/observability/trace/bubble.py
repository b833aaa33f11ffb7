"""Computes the bubble of a pipeline: the share of time in which its ranks were idle, measured and in theory.

The theory is the schedule's simulator with the measured duration of each kind of action and stage, and no time for
messages. ``even`` is the closed form for equal stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple, get_args

from echelon.base.errors import EchelonError
from echelon.observability.trace.intervals import Interval, clipped, length, union, without
from echelon.observability.trace.span import DEVICE, HOST, Span
from echelon.observability.trace.step_breakdown import Windows
from echelon.observability.trace.trace_files import RankTrace
from echelon.plan.schedule import Kind, make_schedule
from echelon.plan.simulate import Simulation, simulate
from echelon.strategy.annotations.marks import ScheduleName

WAITS = ("bubble", "wait")


class Bubble(NamedTuple):
    """The idle shares of the time in which a pipeline runs: measured, simulated, and for equal stages."""

    measured: float
    theory: float | None
    even: float | None

    def to_json(self) -> dict[str, float | None]:
        return self._asdict()


class _Pipeline(NamedTuple):
    """One step of one pipeline: the actions of each rank, each with its busy seconds."""

    step: int
    actions: dict[int, list[tuple[Span, float]]]

    @property
    def window(self) -> Interval:
        spans = [span for own in self.actions.values() for span, _ in own]
        return min(span.begin for span in spans), max(span.end for span in spans)

    @property
    def idle(self) -> float:
        begin, end = self.window
        busy = sum(seconds for own in self.actions.values() for _, seconds in own)
        return 1 - busy / ((end - begin) * len(self.actions)) if end > begin else 0.0


def find_bubble(ranks: Sequence[RankTrace]) -> tuple[Bubble | None, Windows]:
    """Return the bubble over all pipelines and steps, and the time window of each rank's pipeline in each step."""
    pipelines = _pipelines(ranks)
    windows = {(rank, one.step): one.window for one in pipelines for rank in one.actions}
    if not pipelines:
        return None, windows
    theories = [share for one in pipelines if (share := _theory(one, ranks)) is not None]
    theory = fmean(theories) if theories else None
    return Bubble(fmean(one.idle for one in pipelines), theory, _even(ranks)), windows


def _pipelines(ranks: Sequence[RankTrace]) -> list[_Pipeline]:
    found: defaultdict[tuple[int, int, int], dict[int, list[tuple[Span, float]]]] = defaultdict(dict)
    for ranked in ranks:
        replica, _, split = ranked.place
        for step, actions in _actions(ranked).items():
            found[step, replica, split][ranked.rank] = actions
    return [_Pipeline(step, actions) for (step, _, _), actions in found.items() if len(actions) > 1]


def _actions(ranked: RankTrace) -> dict[int, list[tuple[Span, float]]]:
    """Return this rank's actions by step, each with its busy seconds: those without waits, or on a GPU with kernels."""
    waits = union((s.begin, s.end) for s in ranked.spans if s.lane == HOST and s.kind in WAITS)
    device = [s for s in ranked.spans if s.lane == DEVICE and s.kind == "kernel" and "copy" not in s.more]
    kernels = union((span.begin, span.end) for span in device)
    found: defaultdict[int, list[tuple[Span, float]]] = defaultdict(list)
    for span in ranked.spans:
        if "action" in span.more and span.lane == HOST:
            whole = [(span.begin, span.end)]
            busy = clipped(kernels, span.begin, span.end) if device else without(whole, waits)
            found[span.step].append((span, length(busy)))
    return found


def _theory(pipeline: _Pipeline, ranks: Sequence[RankTrace]) -> float | None:
    simulated = _simulated(pipeline, next((r.about.get("schedule") for r in ranks if r.rank in pipeline.actions), None))
    if simulated is None or not simulated.makespan:
        return None
    return 1 - sum(simulated.busy) / (simulated.makespan * len(simulated.busy))


def _simulated(pipeline: _Pipeline, fields: Any) -> Simulation | None:
    durations: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for own in pipeline.actions.values():
        for span, seconds in own:
            durations[span.more["action"], span.more["stage"]].append(seconds)
    try:
        schedule = make_schedule(fields["name"], fields["stages"], len(pipeline.actions), fields["micro_batches"])
        return simulate(schedule, {key: fmean(seconds) for key, seconds in durations.items()})
    except (KeyError, TypeError, EchelonError):  # files of some ranks are missing
        return None


def _even(ranks: Sequence[RankTrace]) -> float | None:
    """Return (p - 1) / (v m + p - 1) for p ranks, m micro-batches and v stages per rank; None for zero-bubble."""
    about: dict[str, Any] = ranks[0].about
    fields: Any = about.get("schedule")
    mesh: Any = about.get("mesh")
    try:
        if fields["name"] not in get_args(ScheduleName) or fields["name"] == "zero-bubble":
            return None
        idle = mesh["stage"] - 1
        return float(idle / (fields["micro_batches"] * fields["stages"] / mesh["stage"] + idle))
    except (KeyError, TypeError, ZeroDivisionError):
        return None
