"""How long a schedule takes and what it holds: every action of every rank, event by event, without running anything."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.errors import EchelonError
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
    busy:     each rank's time in actions.
    peak:     the most each rank holds at once: activations of one stage for one micro-batch, or what ``held`` says.
    events:   the timeline, in order of beginning.
    """

    makespan: float
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
    run.events.sort(key=lambda event: (event.begin, event.rank, event.end))
    return Simulation(max(run.clock, default=0.0), tuple(run.busy), tuple(run.peak), tuple(run.events))


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
        self.done: dict[Action, float] = {}
        self.waiting: defaultdict[Action, list[int]] = defaultdict(list)
        actions = [action for actions in self.schedule for action in actions]
        self.backward: dict[int, Kind] = {action.stage: action.kind for action in actions if action.kind in "BI"}
        stages = sorted({action.stage for action in actions})
        edges = self.edges if self.edges is not None else dict.fromkeys(itertools.pairwise(stages), 0.0)
        self.into: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        self.out_of: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for (source, target), seconds in edges.items():
            apart = source % ranks != target % ranks
            self.into[target].append((source, seconds * apart))
            self.out_of[source].append((target, seconds * apart))

    def advance(self, rank: int) -> list[int]:
        """Let ``rank`` act until it has to wait; the ranks that were waiting for what it did."""
        woken = []
        actions = self.schedule[rank]
        while self.at[rank] < len(actions):
            action = actions[self.at[rank]]
            needs = self.needs(action)
            missing = next((need for need, _ in needs if need not in self.done), None)
            if missing is not None:
                self.waiting[missing].append(rank)
                break
            self.act(rank, action, max([self.clock[rank], *(self.done[need] + later for need, later in needs)]))
            woken += self.waiting.pop(action, [])
        return woken

    def needs(self, action: Action) -> list[tuple[Action, float]]:
        """The actions that come before this one, and how long their results travel."""
        kind, micro, stage = action
        if kind == "F":
            return [(Action("F", micro, source), seconds) for source, seconds in self.into[stage]]
        if kind == "W":
            return [(Action("I", micro, stage), 0.0)]
        after = [(Action(self.backward[target], micro, target), seconds) for target, seconds in self.out_of[stage]]
        return [(Action("F", micro, stage), 0.0), *after]

    def act(self, rank: int, action: Action, begin: float) -> None:
        seconds = self.durations[action.kind, action.stage]
        self.clock[rank] = self.done[action] = begin + seconds
        self.busy[rank] += seconds
        self.at[rank] += 1
        self.holds[rank] += self.gains(action)
        self.peak[rank] = max(self.peak[rank], self.holds[rank])
        self.events.append(Event(rank, action, begin, begin + seconds))

    def gains(self, action: Action) -> float:
        whole = self.held.get(("F", action.stage), 1.0)
        for_weights = self.held.get(("I", action.stage), 1.0)
        return {"F": whole, "B": -whole, "I": for_weights - whole, "W": -for_weights}[action.kind]

    def check_finished(self) -> None:
        stuck = [
            f"rank {rank} at {_words(actions[at])} waits for {_words(missing)}"
            for rank, (actions, at) in enumerate(zip(self.schedule, self.at, strict=True))
            if at < len(actions)
            for missing in [next(need for need, _ in self.needs(actions[at]) if need not in self.done)]
        ]
        if stuck:
            raise Deadlock(f"the schedule never ends: {'; '.join(stuck)}")


def _words(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.micro} in stage {action.stage}"
