"""Pipeline schedules as data: the ordered actions of every rank, which the runner executes and the simulator times.

gpipe        all forwards, then all backwards                            (Huang et al. 2019)
1f1b         one forward, one backward, with few micro-batches in flight (Narayanan et al. 2019, PipeDream-Flush)
interleaved  1f1b with several stages per rank, for a smaller bubble     (Narayanan et al. 2021)
zero-bubble  1f1b with weight gradients where a rank would be idle       (Qi et al. 2023, ZB-H1)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, get_args

from echelon.base.errors import UsageError, nearest
from echelon.strategy.annotations.marks import ScheduleName

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One action of a rank.

    kind:  F: forward; B: full backward; I: backward for the inputs only; W: backward for the weights only
    micro: micro-batch
    stage: stage
    """

    kind: Kind
    micro: int
    stage: int


Schedule = tuple[tuple[Action, ...], ...]  #: one tuple per pipeline rank


def make_schedule(name: ScheduleName, stages: int, ranks: int, micro_batches: int) -> Schedule:
    """Return the actions of each of ``ranks`` for ``micro_batches``. Stage s is on rank s % ranks.

    Raises ``UsageError`` if the schedule does not exist or does not fit the numbers of stages and ranks.
    """
    _check_name(name)
    _check_counts(stages, ranks, micro_batches)
    if name == "interleaved":
        _check_interleaved(stages, ranks)
    else:
        _check_one_stage_a_rank(name, stages, ranks)
    return tuple(rank_actions(name, stages, ranks, micro_batches, rank) for rank in range(ranks))


def rank_actions(name: ScheduleName, stages: int, ranks: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Return the actions of one rank of a schedule."""
    if name == "interleaved":
        return _interleaved(rank, ranks, stages // ranks, micro_batches)
    return tuple(_ONE_STAGE[name](rank, ranks, micro_batches))


def forward_only(stages: int, ranks: int, micro_batches: int) -> Schedule:
    """Return a schedule for evaluation: every micro-batch runs forward through every stage."""
    _check_counts(stages, ranks, micro_batches)
    _check_whole_rounds("a forward pass", stages, ranks)
    groups = _groups(micro_batches, ranks)
    return tuple(tuple(_forwards(rank, ranks, stages // ranks, groups)) for rank in range(ranks))


# ---- one stage per rank ----


def _gpipe(stage: int, stages: int, micros: int) -> Iterator[Action]:
    yield from (Action("F", micro, stage) for micro in range(micros))
    yield from (Action("B", micro, stage) for micro in range(micros))


def _one_forward_one_backward(stage: int, stages: int, micros: int) -> Iterator[Action]:
    forwards = (Action("F", micro, stage) for micro in range(micros))
    backwards = (Action("B", micro, stage) for micro in range(micros))
    return _warm_then_alternate(stages - 1 - stage, forwards, backwards)


def _zero_bubble(stage: int, stages: int, micros: int) -> Iterator[Action]:
    """Yield 1f1b with I in place of B, and W's in its gaps.

    From the I on where 1f1b would begin to leave gaps, a W follows each I; the remaining W's come at the end. Every
    rank thus has as many micro-batches in flight as the first rank of 1f1b.
    """
    weights = (Action("W", micro, stage) for micro in range(micros))
    for action in _one_forward_one_backward(stage, stages, micros):
        if action.kind == "F":
            yield action
        else:
            yield action._replace(kind="I")
            if action.micro >= stage:
                yield next(weights)
    yield from weights


_ONE_STAGE: dict[str, Callable[[int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zero-bubble": _zero_bubble,
}


def _warm_then_alternate(warm_up: int, forwards: Iterable[Action], backwards: Iterable[Action]) -> Iterator[Action]:
    """Yield ``warm_up`` forwards, then forwards and backwards in turn, then the remaining backwards."""
    forwards, backwards = iter(forwards), iter(backwards)
    yield from itertools.islice(forwards, warm_up)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


# ---- several stages per rank ----


def _interleaved(rank: int, ranks: int, chunks: int, micros: int) -> tuple[Action, ...]:
    """Return the actions of one rank with several stages ("chunks").

    A group of micro-batches passes all chunks of a rank before the next group begins.
    """
    groups = _groups(micros, ranks)
    warm_up = (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank)
    backwards = (
        Action("B", micro, chunk * ranks + rank)
        for group in groups
        for chunk in reversed(range(chunks))
        for micro in group
    )
    return tuple(_warm_then_alternate(warm_up, _forwards(rank, ranks, chunks, groups), backwards))


def _forwards(rank: int, ranks: int, chunks: int, groups: list[range]) -> Iterator[Action]:
    return (Action("F", micro, chunk * ranks + rank) for group in groups for chunk in range(chunks) for micro in group)


def _groups(micros: int, ranks: int) -> list[range]:
    """Return groups of ``ranks`` micro-batches, or larger groups of nearly equal size if that leaves a remainder.

    A group of fewer than ``ranks`` micro-batches would leave ranks idle in the middle of the schedule.
    """
    count = max(1, micros // ranks)
    size, larger = divmod(micros, count)
    ends = list(itertools.accumulate(size + (group < larger) for group in range(count)))
    return [range(first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# ---- checks ----


def _check_name(name: str) -> None:
    if name not in get_args(ScheduleName):
        raise UsageError(f"there is no pipeline schedule '{name}'{nearest(name, get_args(ScheduleName))}")


def _check_counts(stages: int, ranks: int, micro_batches: int) -> None:
    for what, count in (("stages", stages), ("ranks", ranks), ("micro-batches", micro_batches)):
        if count < 1:
            raise UsageError(f"a pipeline cannot have {count} {what}: use 1 or more")


def _check_one_stage_a_rank(name: str, stages: int, ranks: int) -> None:
    if stages == ranks:
        return
    interleaved = ", or schedule='interleaved'" if stages % ranks == 0 else ""
    raise UsageError(
        f"schedule='{name}' runs one stage a rank, but there are {stages} stages for {ranks} ranks: "
        f"use {ranks} stages or {stages} ranks{interleaved}"
    )


def _check_interleaved(stages: int, ranks: int) -> None:
    if stages == ranks:
        raise UsageError(
            f"schedule='interleaved' runs two or more stages a rank, but there are {stages} stages for {ranks} ranks: "
            f"use {2 * ranks} or {3 * ranks} stages, or schedule='1f1b'"
        )
    _check_whole_rounds("schedule='interleaved'", stages, ranks)


def _check_whole_rounds(what: str, stages: int, ranks: int) -> None:
    if stages % ranks == 0:
        return
    least = 2 if "interleaved" in what else 1
    below = max(least, stages // ranks) * ranks
    divisors = [str(count) for count in range(1, stages // least + 1) if stages % count == 0]
    raise UsageError(
        f"{what} needs as many stages on every rank, but there are {stages} stages for {ranks} ranks: "
        f"use {below} or {below + ranks} stages, or a number of ranks among {', '.join(divisors)}"
    )
