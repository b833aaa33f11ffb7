"""What a rank of a pipeline holds beside what it is doing, at every action of its schedule. Pure: counts only.

A rank does its actions in a fixed order, so what it holds does not depend on how long anything takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from echelon.plan.schedule import Action, Kind, rank_actions
from echelon.strategy.annotations.marks import ScheduleName

AHEAD = 2  # messages that are expected while an action runs, see parallel.pipeline.loop
STEADY = 4  # times the ranks: from so many micro-batches on, a schedule only repeats itself


class ScheduleMoment(NamedTuple):
    """An action, and what else there is, by the rank's stages (its "chunks").

    open:     other micro-batches that wait for their backward
    waiting:  other micro-batches that wait for their weights' gradients (zero-bubble)
    made:     whether a backward has made gradients of weights already
    returned: messages with gradients that nobody has said to have received
    coming, returning: messages from earlier and from later stages that are expected meanwhile
    """

    kind: Kind
    chunk: int
    open: tuple[int, ...]
    waiting: tuple[int, ...]
    made: tuple[bool, ...]
    returned: int = 0
    coming: int = 0
    returning: int = 0


def moments(name: ScheduleName, stages: int, ranks: int, micro_batches: int) -> tuple[tuple[ScheduleMoment, ...], ...]:
    """For each rank the moments among which its fullest one is."""
    return tuple(moments_of_rank(name, stages, ranks, micro_batches, rank) for rank in range(ranks))


def moments_of_rank(
    name: ScheduleName, stages: int, ranks: int, micro_batches: int, rank: int
) -> tuple[ScheduleMoment, ...]:
    """The moments among which one rank's fullest is."""
    if name == "1f1b":  # a rank goes by the number of ranks behind it alone, and repeats itself soon
        behind = ranks - 1 - rank
        return _moments_of_rank(name, behind + 1, behind + 1, min(micro_batches, behind + 4), 0, rank > 0)
    if name == "gpipe":  # everything is open when the first goes back: only how many that are grows
        few = min(micro_batches, 2 * AHEAD + 2)
        short = _moments_of_rank(name, stages, ranks, few, rank, rank > 0)
        return tuple(one._replace(open=(one.open[0] + micro_batches - few,)) for one in short)
    count = min(micro_batches, STEADY * ranks + micro_batches % ranks)
    return _moments_of_rank(name, stages, ranks, count, rank, rank > 0)


@functools.lru_cache(maxsize=65536)
def _moments_of_rank(
    name: ScheduleName, stages: int, ranks: int, count: int, rank: int, fed: bool
) -> tuple[ScheduleMoment, ...]:
    """``fed``: whether its first stage receives something from another."""
    actions = tuple(rank_actions(name, stages, ranks, count, rank))
    return _fullest(_ends(_walk(actions, _expected(actions, stages, fed), ranks, stages // ranks)))


def _expected(actions: tuple[Action, ...], stages: int, fed: bool) -> list[tuple[int, int]]:
    """For each action, how many of the next messages come from earlier and from later stages."""
    soon: list[bool] = []  # of the actions behind, those with a message: whether from a later stage
    found = []
    for kind, _, stage in reversed(actions):
        found.append((sum(not later for later in soon), sum(soon)))
        if (kind == "F" and (stage > 0 or fed)) or (kind in "BI" and stage < stages - 1):
            soon = [kind != "F", *soon][:AHEAD]
    return found[::-1]


def one_after_another(micro_batches: int) -> tuple[ScheduleMoment, ...]:
    """Without a pipeline: each micro-batch goes forward and backward before the next."""
    kinds: tuple[Kind, ...] = ("F", "B")
    return tuple(ScheduleMoment(kind, 0, (0,), (0,), (made,)) for kind in kinds for made in {False, micro_batches > 1})


def _walk(
    actions: tuple[Action, ...], expected: list[tuple[int, int]], ranks: int, chunks: int
) -> list[ScheduleMoment]:
    held, waiting, made = [0] * chunks, [0] * chunks, [False] * chunks
    returned = 0
    found: dict[ScheduleMoment, None] = {}
    for action, soon in zip(actions, expected, strict=True):
        chunk = action.stage // ranks
        if action.kind in "BI":
            held[chunk] -= 1
        if action.kind == "W":
            waiting[chunk] -= 1
        if action.kind == "F":
            returned = min(returned, 1)
        found[ScheduleMoment(action.kind, chunk, tuple(held), tuple(waiting), tuple(made), returned, *soon)] = None
        held[chunk] += action.kind == "F"
        waiting[chunk] += action.kind == "I"
        made[chunk] |= action.kind in "BW"
        returned += action.kind in "BI"
    return list(found)


def _fullest(found: Sequence[ScheduleMoment]) -> tuple[ScheduleMoment, ...]:
    """Without those that another one of the same action surpasses in everything."""
    kept: list[ScheduleMoment] = []
    for moment in sorted(found, key=lambda one: (-sum(one.made), [-count for count in _counts(one)])):
        if not any(_surpasses(other, moment) for other in kept):
            kept.append(moment)
    return tuple(kept)


def _ends(found: Sequence[ScheduleMoment]) -> tuple[ScheduleMoment, ...]:
    """Without those that lie on a line between two others: bytes are sums over counts, so an end has as many."""
    kept: list[ScheduleMoment] = []
    for moment in sorted(found, key=lambda one: (one.kind, one.chunk, one.made, _counts(one))):
        if len(kept) > 1 and _step(kept[-2], kept[-1]) == _step(kept[-1], moment) is not None:
            kept.pop()
        kept.append(moment)
    return tuple(kept)


def _step(one: ScheduleMoment, other: ScheduleMoment) -> tuple[int, ...] | None:
    """The direction from one moment to another of the same action."""
    if (one.kind, one.chunk, one.made) != (other.kind, other.chunk, other.made):
        return None
    steps = [b - a for a, b in zip(_counts(one), _counts(other), strict=True)]
    whole = math.gcd(*steps)
    return tuple(step // whole for step in steps)


def _counts(one: ScheduleMoment) -> tuple[int, ...]:
    return (*one.open, *one.waiting, one.returned, one.coming, one.returning)


def _surpasses(one: ScheduleMoment, other: ScheduleMoment) -> bool:
    alike = (one.kind, one.chunk) == (other.kind, other.chunk)
    return alike and one.made >= other.made and all(a >= b for a, b in zip(_counts(one), _counts(other), strict=True))
