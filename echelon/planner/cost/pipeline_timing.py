"""How long a pipeline takes from the durations of its stages: event by event, or by closed forms for a quick look.

Both go by the runtime's own schedules. With many micro-batches a shorter run is simulated and its steady part repeated.
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
    """What the stages take for one micro-batch: F, B and the part of B that may be put off; ``edges``: to the next."""

    forward: Sequence[float]
    backward: Sequence[float]
    for_weights: Sequence[float]
    edges: Sequence[float]

    def __len__(self) -> int:
        return len(self.forward)

    def unlinked(self) -> StageDurations:
        """The same, if transfers took no time."""
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
    """makespan: of all ranks; unlinked: the same if transfers took no time; ends: when each rank has done its last."""

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
    unlinked = max(0.0, max(ends) - transfers)  # the closed forms tell such a difference well enough
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
    """When each rank ends. After some three rounds through the pipeline, every further one is as long as the last."""

    def run(count: int) -> tuple[Sequence[float], tuple[Event, ...]]:
        done = simulate(_schedule(name, stages, ranks, count), durations, edges)
        return done.ends, done.events

    shorter = 3 * ranks + micros % ranks
    if events or micros <= shorter + ranks:
        return run(micros)
    first, second = run(shorter)[0], run(shorter + ranks)[0]
    rounds = (micros - shorter) / ranks
    return [a + (b - a) * rounds for a, b in zip(first, second, strict=True)], ()


_schedule = functools.lru_cache(maxsize=32)(make_schedule)  # plans that look alike share one


# ---- closed forms ----


def estimate_pipeline(name: ScheduleName, stages: StageDurations, ranks: int, micros: int) -> PipelineTiming:
    makespan, unlinked = (_closed(name, each, ranks, micros) for each in (stages, stages.unlinked()))
    if name == "zero-bubble":  # what is put off fills the end of every rank
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
    """Between two micro-batches in the steady part of 1f1b: stage s has as many in flight as there are stages from it
    on, so that a round through those serves that many; or as many as there are at all."""
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
    """Weights' gradients fill gaps as far as there are any to fill them with."""
    slowest = max(range(len(both)), key=both.__getitem__)
    gap = sum(both) - both[slowest] + 2 * sum(stages.edges[: len(both) - 1])
    put_off = 2 * stages.for_weights[slowest] * min(micros, len(both) - 1)  # out of the way back, and into the gap
    least = sum(stages.forward[:slowest])  # nothing can begin before the first micro-batch has come
    return micros * both[slowest] + max(least, gap - put_off)
