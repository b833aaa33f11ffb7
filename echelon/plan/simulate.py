"""How long a schedule takes and what it holds: every action of every rank, event by event, without running anything."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.base.errors import EchelonError
from echelon.plan.schedule import Action, Kind

Edge = tuple[int, int]  #: from the stage that makes a tensor to the stage that needs it


class Event(NamedTuple):
    """One action as it happened."""

    rank: int
    action: Action
    begin: float
    end: float


class Deadlock(EchelonError):
    """A schedule in which ranks wait for each other for ever."""


@dataclass(frozen=True)
class Simulation:
    """makespan: from the first action's begin to the last one's end.
    ends:     when each rank has done its last.
    busy:     each rank's time in actions.
    peak:     the most each rank holds at once: activations of one stage for one micro-batch, or what ``held`` says.
    events:   the timeline, in order of beginning.
    """

    makespan: float
    ends: tuple[float, ...]
    busy: tuple[float, ...]
    peak: tuple[float, ...]
    events: tuple[Event, ...]

    def bubble(self) -> float:
        """How long the busiest rank is idle."""
        return self.makespan - max(self.busy)


def simulate(
    schedule: Sequence[Sequence[Action]],
    durations: Mapping[tuple[Kind, int], float],
    edges: Mapping[Edge, float] | None = None,
    held: Mapping[tuple[Kind, int], float] | None = None,
) -> Simulation:
    """Time ``schedule``.

    durations: how long an action of (kind, stage) takes.
    edges:     how long a transfer from stage to stage takes, there or back; between stages of one rank it takes none.
               None: each stage sends to the next, in no time. Transfers overlap with computing and with each other.
    held:      what is held from F on, by ("F", stage), and between I and W, by ("I", stage); 1 where it says nothing.
    """
    run = _Run(schedule, durations, edges, held or {})
    ready = list(range(len(schedule)))
    while ready:
        ready += run.advance(ready.pop())
    run.check_finished()
    run.events.sort(key=operator.itemgetter(2, 0, 3))  # begin, rank, end
    makespan, ends = max(run.clock, default=0.0), tuple(run.clock)
    return Simulation(makespan, ends, tuple(run.busy), tuple(run.peak), tuple(run.events))


_Key = tuple[Kind, int, int]  # an Action, or a plain tuple equal to it, which is quicker to make


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
        """For each kind of action, those that come before it, and how long their results travel."""
        ranks, stages = len(self.schedule), sorted({stage for _, stage in kinds})
        backward: dict[int, Kind] = {stage: kind for kind, stage in kinds if kind in "BI"}
        found: dict[tuple[Kind, int], list[tuple[Kind, int, float]]] = {
            (kind, stage): [] if kind == "F" else [("I" if kind == "W" else "F", stage, 0.0)] for kind, stage in kinds
        }
        edges = self.edges if self.edges is not None else dict.fromkeys(itertools.pairwise(stages), 0.0)
        for (source, target), seconds in edges.items():
            later = seconds * (source % ranks != target % ranks)
            found["F", target].append(("F", source, later))
            if source in backward:
                found[backward[source], source].append((backward[target], target, later))
        return found

    def _gains(self, kind: Kind, stage: int) -> float:
        whole, for_weights = self.held.get(("F", stage), 1.0), self.held.get(("I", stage), 1.0)
        return {"F": whole, "B": -whole, "I": for_weights - whole, "W": -for_weights}[kind]

    def advance(self, rank: int) -> list[int]:
        """Let ``rank`` act until it has to wait; the ranks that were waiting for what it did."""
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
