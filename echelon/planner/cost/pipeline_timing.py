"""Duration of a pipeline step from the durations of its stages: by event simulation, or by closed forms for speed.

Both use the runtime's own schedules. With many micro-batches, a shorter run is simulated and its steady part repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.plan.schedule import Kind, make_schedule
from echelon.plan.simulate import Event, simulate
from echelon.strategy.annotations.marks import ScheduleName


@dataclass(frozen=True)
class StageDurations:
    """Seconds of each stage for one micro-batch.

    for_weights: part of ``backward`` that may be deferred
    edges:       seconds of the transfer to the next stage
    """

    forward: Sequence[float]
    backward: Sequence[float]
    for_weights: Sequence[float]
    edges: Sequence[float]

    def __len__(self) -> int:
        return len(self.forward)

    def unlinked(self) -> StageDurations:
        """Return a copy in which transfers take no time."""
        return replace(self, edges=[0.0] * len(self))

    def durations(self) -> dict[tuple[Kind, int], float]:
        found: dict[tuple[Kind, int], float] = {}
        for stage in range(len(self)):
            found["F", stage], found["B", stage] = self.forward[stage], self.backward[stage]
            found["W", stage] = self.for_weights[stage]
            found["I", stage] = self.backward[stage] - self.for_weights[stage]
        return found


@dataclass(frozen=True)
class PipelineTiming:
    """Seconds of a pipeline step.

    makespan: time until all ranks are done
    unlinked: the makespan if transfers took no time
    ends:     time at which each rank ends its last action
    """

    makespan: float
    unlinked: float
    ends: tuple[float, ...]
    events: tuple[Event, ...] = ()


def simulate_pipeline(
    name: ScheduleName, stages: StageDurations, ranks: int, micros: int, events: bool = False
) -> PipelineTiming:
    linked = {(s, s + 1): seconds for s, seconds in enumerate(stages.edges[: len(stages) - 1])}
    ends, timeline = _ends(name, len(stages), ranks, micros, stages.durations(), linked, events)
    transfers = _closed(name, stages, ranks, micros) - _closed(name, stages.unlinked(), ranks, micros)
    unlinked = max(0.0, max(ends) - transfers)  # closed forms are accurate enough for this difference
    return PipelineTiming(max(ends), unlinked, tuple(ends), timeline)


def _ends(
    name: ScheduleName,
    stages: int,
    ranks: int,
    micros: int,
    durations: Mapping[tuple[Kind, int], float],
    edges: Mapping[tuple[int, int], float],
    events: bool,
) -> tuple[Sequence[float], tuple[Event, ...]]:
    """Return the time at which each rank ends, and the events if requested.

    After about three rounds through the pipeline, every further round takes as long as the last.
    """

    def run(count: int) -> tuple[Sequence[float], tuple[Event, ...]]:
        done = simulate(_schedule(name, stages, ranks, count), durations, edges)
        return done.ends, done.events

    shorter = 3 * ranks + micros % ranks
    if events or micros <= shorter + ranks:
        return run(micros)
    first, second = run(shorter)[0], run(shorter + ranks)[0]
    rounds = (micros - shorter) / ranks
    return [a + (b - a) * rounds for a, b in zip(first, second, strict=True)], ()


_schedule = functools.lru_cache(maxsize=32)(make_schedule)  # similar plans share one schedule


# ---- closed forms ----


def estimate_pipeline(name: ScheduleName, stages: StageDurations, ranks: int, micros: int) -> PipelineTiming:
    makespan, unlinked = (_closed(name, each, ranks, micros) for each in (stages, stages.unlinked()))
    if name == "zero-bubble":  # deferred weight gradients keep every rank busy to the end
        return PipelineTiming(makespan, unlinked, (makespan,) * ranks)
    ends, end = [], makespan
    for rank in range(ranks):
        ends.append(end)
        end -= stages.backward[rank] + stages.edges[rank]
    return PipelineTiming(makespan, unlinked, tuple(ends))


def _closed(name: ScheduleName, stages: StageDurations, ranks: int, micros: int) -> float:
    both = [f + b for f, b in zip(stages.forward, stages.backward, strict=True)]
    through = sum(both[:ranks]) + 2 * sum(stages.edges[: ranks - 1])
    if name == "gpipe":
        return through + (micros - 1) * (max(stages.forward) + max(stages.backward))
    if name == "1f1b":
        return through + (micros - 1) * _period(both, stages.edges, micros)
    if name == "zero-bubble":
        return _zero_bubble(stages, both, micros)
    on_rank = [sum(both[rank::ranks]) for rank in range(ranks)]
    chunks = len(both) // ranks
    return micros * max(on_rank) + (sum(on_rank) - max(on_rank)) / chunks + 2 * sum(stages.edges[: ranks - 1])


def _period(both: Sequence[float], edges: Sequence[float], micros: int) -> float:
    """Return the seconds between two micro-batches in the steady part of 1f1b.

    A stage has as many micro-batches in flight as there are stages from it on, so a round trip through those stages
    serves that many micro-batches. Stages with at least as many in flight as there are micro-batches do not limit.
    """
    longest, behind, linked = 0.0, 0.0, 0.0
    last = len(both) - 1
    for stage in range(last, -1, -1):
        behind += both[stage]
        linked += 2 * edges[stage] if stage < last else 0.0
        in_flight = last - stage + 1
        if in_flight < micros:
            longest = max(longest, (behind + linked) / in_flight)
    return max(longest, *both)


def _zero_bubble(stages: StageDurations, both: Sequence[float], micros: int) -> float:
    """Return the makespan of zero-bubble, in which deferred weight gradients fill the gaps as far as they suffice."""
    slowest = max(range(len(both)), key=both.__getitem__)
    gap = sum(both) - both[slowest] + 2 * sum(stages.edges[: len(both) - 1])
    # Deferring counts twice: it shortens the backward path, and it fills the gap.
    put_off = 2 * stages.for_weights[slowest] * min(micros, len(both) - 1)
    least = sum(stages.forward[:slowest])  # the slowest stage cannot begin before the first micro-batch arrives
    return micros * both[slowest] + max(least, gap - put_off)
