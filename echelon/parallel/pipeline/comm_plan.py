"""CommPlan: the messages of a schedule and its transfers, their ranks, and their order; without side effects."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from echelon.plan.schedule import Action, Kind, Schedule
from echelon.plan.simulate import Edge, simulate

AHEAD = 2  # later actions whose receives are posted while an action runs


class StageTransfer(NamedTuple):
    """One tensor that stage ``source`` makes and stage ``target`` needs."""

    key: str
    source: int
    target: int


class StageMessage(NamedTuple):
    """All tensors of one micro-batch that ``source`` makes for ``target``, or with ``backward`` their gradients."""

    source: int
    target: int
    micro: int
    backward: bool

    @property
    def edge(self) -> Edge:
        return self.source, self.target

    def __str__(self) -> str:
        ends = (self.target, self.source) if self.backward else self.edge
        return f"micro-batch {self.micro}, stage {ends[0]} to {ends[1]}"


class ScheduledAction(NamedTuple):
    """An action of this rank with its messages.

    needs:  messages that the action receives
    sends:  messages that the action sends
    soon:   messages from other ranks to receive for this action and for the next AHEAD actions that need any
    """

    action: Action
    needs: list[StageMessage]
    sends: list[StageMessage]
    soon: list[StageMessage]


class CommPlan:
    """The messages that one rank of the pipeline, ``place``, sends and receives."""

    def __init__(self, schedule: Schedule, transfers: Sequence[StageTransfer], place: int) -> None:
        self.place, self.ranks = place, len(schedule)
        self.stages = 1 + max((action.stage for actions in schedule for action in actions), default=0)
        self.keys = _keys_by_edge(transfers)
        self._into, self._out_of = defaultdict[int, list[Edge]](list), defaultdict[int, list[Edge]](list)
        for source, target in sorted(self.keys):
            self._into[target].append((source, target))
            self._out_of[source].append((source, target))
        self.sent_at: dict[StageMessage, int] = {}  #: index of the sending action in its rank's list
        self.needed_at: dict[StageMessage, int] = {}  #: index of the receiving action in its rank's list
        #: index of each message between ranks in one order, equal on all ranks; a rank's sends follow its actions
        self.order: dict[StageMessage, int] = {}
        for actions in schedule:
            for at, action in enumerate(actions):
                self.sent_at.update(dict.fromkeys(self.sends(action), at))
                self.needed_at.update(dict.fromkeys(self.needs(action), at))
        self.order = {message: at for at, message in enumerate(self._in_order(schedule))}
        self.trains = any(action.kind != "F" for actions in schedule for action in actions)
        self.actions = self._scheduled(schedule[place])
        self.outgoing = [message for message in self.order if self.sender(message) == self.place]
        self.incoming = [message for message in self.order if self.receiver(message) == self.place]

    def _scheduled(self, actions: Sequence[Action]) -> list[ScheduledAction]:
        needs = [self.needs(action) for action in actions]
        remote = [[message for message in each if not self.is_local(message)] for each in needs]
        needing = [at for at, messages in enumerate(remote) if messages]
        result = []
        for at, action in enumerate(actions):
            soon = (at, *[index for index in needing if index > at][:AHEAD])
            messages = [message for index in soon for message in remote[index]]
            result.append(ScheduledAction(action, needs[at], self.sends(action), messages))
        return result

    def sends(self, action: Action) -> list[StageMessage]:
        """Return the messages that ``action`` makes for other stages."""
        if action.kind == "F":
            return [StageMessage(*edge, action.micro, backward=False) for edge in self._out_of[action.stage]]
        return [
            StageMessage(*edge, action.micro, backward=True) for edge in self._into[action.stage] if action.kind != "W"
        ]

    def needs(self, action: Action) -> list[StageMessage]:
        """Return the messages that other stages make for ``action``, in a fixed order."""
        if action.kind == "F":
            return [StageMessage(*edge, action.micro, backward=False) for edge in self._into[action.stage]]
        return [
            StageMessage(*edge, action.micro, backward=True)
            for edge in self._out_of[action.stage]
            if action.kind != "W"
        ]

    def sender(self, message: StageMessage) -> int:
        return (message.target if message.backward else message.source) % self.ranks

    def receiver(self, message: StageMessage) -> int:
        return (message.source if message.backward else message.target) % self.ranks

    def is_local(self, message: StageMessage) -> bool:
        return message.source % self.ranks == message.target % self.ranks

    def tag(self, message: StageMessage, *, header: bool) -> int:
        micro_and_edge = (message.micro * self.stages + message.source) * self.stages + message.target
        return micro_and_edge * 4 + 2 * message.backward + header

    def _in_order(self, schedule: Schedule) -> Iterator[StageMessage]:
        """Yield the messages between ranks in the order in which a simulation of the schedule makes them.

        A message comes after all messages that it depends on, so ranks that send and receive in this order cannot
        deadlock.
        """
        kinds: dict[Kind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
        durations = {(kind, stage): time for kind, time in kinds.items() for stage in range(self.stages)}
        events = simulate(schedule, durations, dict.fromkeys(self.keys, 0.0)).events
        for event in sorted(events, key=lambda event: (event.end, event.rank)):
            yield from (message for message in self.sends(event.action) if not self.is_local(message))


@functools.lru_cache(maxsize=16)
def route(schedule: Schedule, transfers: tuple[StageTransfer, ...], place: int) -> CommPlan:
    """Return the cached CommPlan of a rank; it is the same in every step."""
    return CommPlan(schedule, transfers, place)


def _keys_by_edge(transfers: Sequence[StageTransfer]) -> dict[Edge, tuple[str, ...]]:
    keys: dict[Edge, dict[str, None]] = {}
    sources: dict[str, int] = {}
    for key, source, target in transfers:
        assert source < target, f"'{key}' would go back from stage {source} to stage {target}"
        assert sources.setdefault(key, source) == source, f"stages {sources[key]} and {source} both make '{key}'"
        keys.setdefault((source, target), {})[key] = None
    return {edge: tuple(keys[edge]) for edge in sorted(keys)}
