"""Counts of the micro-batches and messages that a pipeline rank holds at every action of its schedule.

A rank runs its actions in a fixed order, so the counts do not depend on durations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from echelon.parallel.pipeline.comm_plan import AHEAD
from echelon.plan.draft import Draft
from echelon.plan.schedule import Action, Kind, rank_actions
from echelon.strategy.annotations.marks import ScheduleName

MANY_BEHIND = 8  # moments of 1F1B on ranks with more ranks behind follow from those of this many
STEADY = 4  # a schedule is periodic from this many micro-batches per rank on


class ScheduleMoment(NamedTuple):
    """An action, and what the rank holds beside it. Tuples have one entry for each of the rank's stages (its "chunks").

    open:     number of other micro-batches that wait for their backward
    waiting:  number of other micro-batches that wait for their weight gradients (zero-bubble)
    made:     True if a backward has already made weight gradients
    returned: number of sent gradient messages whose receipt is not yet known
    coming, returning: number of posted receives from earlier and from later stages
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
    """Return, for each rank, the moments that may be its memory peak."""
    return tuple(moments_of_rank(name, stages, ranks, micro_batches, rank) for rank in range(ranks))


def moments_of_rank(
    name: ScheduleName, stages: int, ranks: int, micro_batches: int, rank: int
) -> tuple[ScheduleMoment, ...]:
    """Return the moments of one rank that may be its memory peak."""
    if name == "1f1b":  # a rank's schedule depends only on the number of ranks after it, and is soon periodic
        behind = min(ranks - 1 - rank, micro_batches)  # all micro-batches are open before the first backward
        if behind > MANY_BEHIND and micro_batches >= behind + 4:
            short = _moments_of_rank(name, MANY_BEHIND + 1, MANY_BEHIND + 1, MANY_BEHIND + 4, 0, rank > 0)
            return tuple(_longer(moment, behind - MANY_BEHIND) for moment in short)
        return _moments_of_rank(name, behind + 1, behind + 1, min(micro_batches, behind + 4), 0, rank > 0)
    if name == "gpipe":  # all micro-batches are open at the first backward: more of them only increase that count
        few = min(micro_batches, 2 * AHEAD + 2)
        short = _moments_of_rank(name, stages, ranks, few, rank, rank > 0)
        return tuple(one._replace(open=(one.open[0] + micro_batches - few,)) for one in short)
    count = min(micro_batches, STEADY * ranks + micro_batches % ranks)
    return _moments_of_rank(name, stages, ranks, count, rank, rank > 0)


def _longer(moment: ScheduleMoment, more: int) -> ScheduleMoment:
    """Return a moment of 1F1B with ``more`` ranks behind: more micro-batches are open, or have been returned."""
    if moment.open[0] > MANY_BEHIND // 2:
        return moment._replace(open=(moment.open[0] + more,))
    return moment._replace(returned=moment.returned + more) if moment.returned > MANY_BEHIND // 2 else moment


def micro_batches_in_flight(draft: Draft, rank: int, saved: Mapping[int, int]) -> dict[int, int]:
    """Return the micro-batches in flight for each stage of a rank, when their saved activations are largest.

    rank:  rank along the stage axis
    saved: bytes saved per micro-batch, by stage
    """
    own = list(range(rank, draft.stages, draft.stage))
    if draft.stage == 1:
        return dict.fromkeys(own, 1)
    found = moments_of_rank(draft.schedule or "1f1b", draft.stages, draft.stage, draft.micro_batches, rank)
    counts = [[n + (at == one.chunk) for at, n in enumerate(one.open)] for one in found if one.kind in "FB"]
    most = max(counts, key=lambda each: sum(n * saved.get(at, 0) for n, at in zip(each, own, strict=True)))
    return dict(zip(own, most, strict=True))


@functools.lru_cache(maxsize=65536)
def _moments_of_rank(
    name: ScheduleName, stages: int, ranks: int, count: int, rank: int, fed: bool
) -> tuple[ScheduleMoment, ...]:
    """Return the moments that may be the peak. ``fed``: True if the rank's first stage receives from another stage."""
    actions = tuple(rank_actions(name, stages, ranks, count, rank))
    return _fullest(_ends(_walk(actions, _expected(actions, stages, fed), ranks, stages // ranks)))


def _expected(actions: tuple[Action, ...], stages: int, fed: bool) -> list[tuple[int, int]]:
    """Return, for each action, how many of the next AHEAD messages come from earlier and from later stages."""
    soon: list[bool] = []  # one entry per next message: True if it comes from a later stage
    found = []
    for kind, _, stage in reversed(actions):
        found.append((sum(not later for later in soon), sum(soon)))
        if (kind == "F" and (stage > 0 or fed)) or (kind in "BI" and stage < stages - 1):
            soon = [kind != "F", *soon][:AHEAD]
    return found[::-1]


def one_after_another(micro_batches: int) -> tuple[ScheduleMoment, ...]:
    """Return the moments without a pipeline, where each micro-batch runs forward and backward before the next."""
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
    """Return the Pareto-optimal moments of each action: no other moment has at least as much of everything."""
    kept: list[ScheduleMoment] = []
    for moment in sorted(found, key=lambda one: (-sum(one.made), [-count for count in _counts(one)])):
        if not any(_surpasses(other, moment) for other in kept):
            kept.append(moment)
    return tuple(kept)


def _ends(found: Sequence[ScheduleMoment]) -> tuple[ScheduleMoment, ...]:
    """Drop the moments that lie on a line between two others: bytes are linear in counts, so a maximum is at an end."""
    kept: list[ScheduleMoment] = []
    for moment in sorted(found, key=lambda one: (one.kind, one.chunk, one.made, _counts(one))):
        if len(kept) > 1 and _step(kept[-2], kept[-1]) == _step(kept[-1], moment) is not None:
            kept.pop()
        kept.append(moment)
    return tuple(kept)


def _step(one: ScheduleMoment, other: ScheduleMoment) -> tuple[int, ...] | None:
    """Return the direction from one moment to another of the same action, or None for different actions."""
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
