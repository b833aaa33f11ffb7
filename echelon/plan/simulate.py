"""Simulation of a pipeline schedule: time and memory of every action of every rank, without running anything."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.base.errors import EchelonError
from echelon.plan.schedule import Action, Kind

Edge = tuple[int, int]  #: (stage that computes a tensor, stage that needs it)


class Event(NamedTuple):
    """One action with its begin and end, in seconds."""

    rank: int
    action: Action
    begin: float
    end: float


class Deadlock(EchelonError):
    """Raised for a schedule in which ranks wait for each other forever."""


@dataclass(frozen=True)
class Simulation:
    """The timing of a schedule.

    makespan: seconds from the begin of the first action to the end of the last one
    ends:     end of each rank's last action
    busy:     seconds that each rank spends in actions
    peak:     most that each rank holds at once, in units of ``held``; by default, micro-batches of one stage
    events:   all actions, in order of their begin
    """

    makespan: float
    ends: tuple[float, ...]
    busy: tuple[float, ...]
    peak: tuple[float, ...]
    events: tuple[Event, ...]

    def bubble(self) -> float:
        """Return the seconds for which the busiest rank is idle."""
        return self.makespan - max(self.busy)


def simulate(
    schedule: Sequence[Sequence[Action]],
    durations: Mapping[tuple[Kind, int], float],
    edges: Mapping[Edge, float] | None = None,
    held: Mapping[tuple[Kind, int], float] | None = None,
) -> Simulation:
    """Simulate ``schedule``. Raises ``Deadlock`` if the schedule never ends.

    durations: seconds of an action of (kind, stage)
    edges:     seconds of a transfer between two stages, in either direction; 0 between stages of one rank. Transfers
               overlap with computation and with each other. Default None: each stage sends to the next, in no time.
    held:      memory held from F to B or I, by ("F", stage), and from I to W, by ("I", stage); default 1
    """
    run = _Run(schedule, durations, edges, held or {})
    ready = list(range(len(schedule)))
    while ready:
        ready += run.advance(ready.pop())
    run.check_finished()
    run.events.sort(key=operator.itemgetter(2, 0, 3))  # begin, rank, end
    makespan, ends = max(run.clock, default=0.0), tuple(run.clock)
    return Simulation(makespan, ends, tuple(run.busy), tuple(run.peak), tuple(run.events))


_Key = tuple[Kind, int, int]  # an Action, or an equal plain tuple, which is faster to create


@dataclass
class _Run:
    schedule: Sequence[Sequence[Action]]
    durations: Mapping[tuple[Kind, int], float]
    edges: Mapping[Edge, float] | None
    held: Mapping[tuple[Kind, int], float]
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = len(self.schedule)
        self.at, self.clock, self.busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.holds, self.peak = [0.0] * ranks, [0.0] * ranks
        self.done: dict[_Key, float] = {}
        self.waiting: defaultdict[_Key, list[int]] = defaultdict(list)
        kinds = {(kind, stage) for actions in self.schedule for kind, _, stage in actions}
        self.needs = self._needs(kinds)
        self.gains = {key: self._gains(*key) for key in kinds}

    def _needs(self, kinds: set[tuple[Kind, int]]) -> dict[tuple[Kind, int], list[tuple[Kind, int, float]]]:
        """Return, for each (kind, stage), the actions it depends on and the transfer times of their results."""
        ranks, stages = len(self.schedule), sorted({stage for _, stage in kinds})
        backward: dict[int, Kind] = {stage: kind for kind, stage in kinds if kind in "BI"}
        result: dict[tuple[Kind, int], list[tuple[Kind, int, float]]] = {
            (kind, stage): [] if kind == "F" else [("I" if kind == "W" else "F", stage, 0.0)] for kind, stage in kinds
        }
        edges = self.edges if self.edges is not None else dict.fromkeys(itertools.pairwise(stages), 0.0)
        for (source, target), seconds in edges.items():
            later = seconds * (source % ranks != target % ranks)
            result["F", target].append(("F", source, later))
            if source in backward:
                result[backward[source], source].append((backward[target], target, later))
        return result

    def _gains(self, kind: Kind, stage: int) -> float:
        whole, for_weights = self.held.get(("F", stage), 1.0), self.held.get(("I", stage), 1.0)
        return {"F": whole, "B": -whole, "I": for_weights - whole, "W": -for_weights}[kind]

    def advance(self, rank: int) -> list[int]:
        """Run the actions of ``rank`` until it has to wait; return the ranks that were waiting for these actions."""
        woken: list[int] = []
        actions, done, needs = self.schedule[rank], self.done, self.needs
        for action in itertools.islice(actions, self.at[rank], None):
            kind, micro, stage = action
            begin = self.clock[rank]
            for other, at, later in needs[kind, stage]:
                ended = done.get((other, micro, at))
                if ended is None:
                    self.waiting[other, micro, at].append(rank)
                    return woken
                begin = max(begin, ended + later)
            self.act(rank, action, begin)
            if action in self.waiting:
                woken += self.waiting.pop(action)
        return woken

    def act(self, rank: int, action: Action, begin: float) -> None:
        key = (action[0], action[2])
        seconds = self.durations[key]
        self.clock[rank] = self.done[action] = end = begin + seconds
        self.busy[rank] += seconds
        self.at[rank] += 1
        self.holds[rank] = holds = self.holds[rank] + self.gains[key]
        self.peak[rank] = max(self.peak[rank], holds)
        self.events.append(Event(rank, action, begin, end))

    def check_finished(self) -> None:
        stuck = [
            f"rank {rank} at {_words(actions[at])} waits for {_words(missing)}"
            for rank, (actions, at) in enumerate(zip(self.schedule, self.at, strict=True))
            if at < len(actions)
            for missing in [self._missing(actions[at])]
        ]
        if stuck:
            raise Deadlock(f"the schedule never ends: {'; '.join(stuck)}")

    def _missing(self, action: Action) -> Action:
        kind, micro, stage = action
        befores = (Action(other, micro, at) for other, at, _ in self.needs[kind, stage])
        return next(before for before in befores if before not in self.done)


def _words(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.micro} in stage {action.stage}"
