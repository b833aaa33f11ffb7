"""Schedules: every action once and in an order that can be, bubbles as in the papers, orders as torch's own."""

from __future__ import annotations

import functools
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from echelon.base.errors import UsageError
from echelon.parallel.pipeline.comm_plan import CommPlan, StageMessage, StageTransfer
from echelon.plan.schedule import Action, Schedule, forward_only, make_schedule
from echelon.plan.simulate import Deadlock, Simulation, simulate
from echelon.strategy.annotations.marks import ScheduleName

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SIZES = [(ranks, micros) for ranks in range(1, 9) for micros in (1, 2, 3, 4, 7, 8, 12, 16, 23)]


def make(name: ScheduleName, ranks: int, micros: int, chunks: int = 2) -> Schedule:
    return make_schedule(name, ranks * chunks if name == "interleaved" else ranks, ranks, micros)


def timed(schedule: Schedule, f: float = 1.0, i: float = 1.0, w: float = 1.0, chunks: int = 1) -> Simulation:
    """Whole stages take f, i and w; where they are in ``chunks``, each takes its part."""
    durations: dict[Any, float] = {}
    for stage in {action.stage for actions in schedule for action in actions}:
        durations |= {("F", stage): f / chunks, ("B", stage): (i + w) / chunks, ("I", stage): i, ("W", stage): w}
    return simulate(schedule, durations)


# ---- every schedule


@pytest.mark.parametrize("name", NAMES)
def test_schedule_actions_once_on_right_rank_in_feasible_order(name: ScheduleName) -> None:
    """Every action is there once, on the right rank and in an order that can be executed."""
    for ranks, micros in SIZES:
        for chunks in (2, 3, 4) if name == "interleaved" else (1,):
            schedule = make(name, ranks, micros, chunks)
            kinds = "FIW" if name == "zero-bubble" else "FB"
            everything = {(kind, m, s) for kind in kinds for m in range(micros) for s in range(ranks * chunks)}
            actions = [action for rank_actions in schedule for action in rank_actions]
            assert set(actions) == everything
            assert len(actions) == len(everything)
            for rank, mine in enumerate(schedule):
                assert {action.stage % ranks for action in mine} == {rank}
                at = {action: place for place, action in enumerate(mine)}
                assert all(
                    at[a] < at[Action(after, a.micro, a.stage)]
                    for a in mine
                    for after in {"F": kinds[1], "I": "W"}.get(a.kind, "")
                )
            timed(schedule)  # would name a deadlock


@given(st.integers(1, 9), st.integers(1, 40), st.integers(2, 5))
@settings(max_examples=60)
def test_interleaved_bubble_as_in_paper_for_any_micro_batches(ranks: int, micros: int, chunks: int) -> None:
    """The interleaved schedule has the bubble given in the paper for any number of micro-batches."""
    bubble = timed(make("interleaved", ranks, micros, chunks), chunks=chunks).bubble()
    if micros >= ranks:
        assert bubble == pytest.approx((ranks - 1) * 3 / chunks)
    else:
        assert bubble <= (ranks - 1) * 3 + 1e-9  # no worse than one stage a rank


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (3.0, 1.0), (0.7, 0.9)])
def test_bubble_of_gpipe_and_1f1b(name: ScheduleName, f: float, b: float) -> None:
    for ranks, micros in SIZES:
        assert timed(make(name, ranks, micros), f, b, 0).bubble() == pytest.approx((ranks - 1) * (f + b))


@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 1.0, 1.0), (1.0, 2.0, 1.0)])
def test_bubble_of_zero_bubble(f: float, i: float, w: float) -> None:
    for ranks, micros in SIZES:
        if micros >= ranks:
            assert timed(make("zero-bubble", ranks, micros), f, i, w).bubble() == pytest.approx(
                (ranks - 1) * (f + i - w)
            )


def test_interleaved_and_zero_bubble_idle_less_than_1f1b() -> None:
    for ranks, micros in SIZES:
        if 1 < ranks <= micros:
            plain = timed(make("1f1b", ranks, micros)).bubble()
            assert timed(make("interleaved", ranks, micros), chunks=2).bubble() < plain
            assert timed(make("zero-bubble", ranks, micros)).bubble() < plain


def test_1f1b_and_zero_bubble_hold_few_activations_and_gpipe_all() -> None:
    for ranks, micros in SIZES:
        assert max(timed(make("gpipe", ranks, micros)).peak) == micros
        assert timed(make("1f1b", ranks, micros)).peak == tuple(min(ranks - rank, micros) for rank in range(ranks))
        assert max(timed(make("zero-bubble", ranks, micros)).peak) <= min(ranks, micros)


def test_forward_only_fills_the_pipeline_once() -> None:
    for ranks, micros in SIZES:
        for chunks in (1, 3):
            schedule = forward_only(ranks * chunks, ranks, micros)
            assert sum(map(len, schedule)) == ranks * chunks * micros
            if micros >= ranks:
                assert timed(schedule).makespan == micros * chunks + ranks - 1


# ---- torch's own schedules as the reference


def torch_order(kind: type, ranks: int, micros: int, chunks: int = 1) -> list[list[tuple[str, int, int]]]:
    """Return torch's order; its schedules know their order before they meet a process group."""
    reference: Any = object.__new__(kind)
    reference._num_stages, reference._n_microbatches = ranks, micros
    reference.n_local_stages, reference.pp_group_size = chunks, ranks
    reference.microbatches_per_round = micros // max(1, micros // ranks)
    if chunks > 1:
        orders = [reference._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        orders = list(reference._get_pipeline_order().values())
    letters = {torch_schedules.FORWARD: "F", torch_schedules.FULL_BACKWARD: "B"}
    return [
        [
            (letters[action.computation_type], action.microbatch_index, action.stage_index)
            for action in order
            if action is not None and action.computation_type in letters
        ]
        for order in orders
    ]


def test_orders_are_those_of_torch() -> None:
    compared = 0
    for ranks, micros in SIZES:
        if micros < ranks:
            continue  # torch's 1f1b sends more micro-batches then than there are
        assert torch_order(torch_schedules.ScheduleGPipe, ranks, micros) == plain(make("gpipe", ranks, micros))
        *others, last = torch_order(torch_schedules.Schedule1F1B, ranks, micros)
        *ours, our_last = plain(make("1f1b", ranks, micros))
        assert others == ours
        # With no warm-up torch counts forwards from 1 in what it tells; what it does is in this order of kinds.
        assert [kind for kind, _, _ in last] == [kind for kind, _, _ in our_last]
        if micros % (micros // ranks) == 0:
            for chunks in (2, 3):
                wanted = torch_order(torch_schedules.ScheduleInterleaved1F1B, ranks, micros, chunks)
                assert wanted == plain(make("interleaved", ranks, micros, chunks))
        compared += 1
    assert compared > 30


def plain(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [[tuple(action) for action in actions] for actions in schedule]  # type: ignore[misc]


# ---- the simulator


@given(st.data())
@settings(max_examples=40)
def test_makespan_is_the_longest_path(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    ranks, micros = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    schedule = make(name, ranks, micros)
    stages = ranks * (2 if name == "interleaved" else 1)
    seconds = st.integers(1, 9).map(float)
    durations: dict[Any, float] = {(kind, s): data.draw(seconds) for kind in "FBIW" for s in range(stages)}
    edges = {
        (s, t): data.draw(seconds) for s in range(stages) for t in range(s + 1, stages) if data.draw(st.booleans())
    }
    back = "I" if name == "zero-bubble" else "B"

    @functools.cache
    def end(rank: int, place: int) -> float:
        kind, micro, stage = schedule[rank][place]
        if kind == "F":
            before = [(Action("F", micro, s), seconds) for (s, t), seconds in edges.items() if t == stage]
        elif kind == "W":
            before = [(Action("I", micro, stage), 0.0)]
        else:
            before = [(Action(back, micro, t), seconds) for (s, t), seconds in edges.items() if s == stage]
        ready = [end(rank, place - 1)] if place else [0.0]
        for action, travel in before:
            other = action.stage % ranks
            ready.append(end(other, schedule[other].index(action)) + (travel if other != rank else 0.0))
        return max(ready) + durations[kind, stage]

    found = simulate(schedule, durations, edges)
    assert found.makespan == max(end(rank, len(actions) - 1) for rank, actions in enumerate(schedule))
    assert found.busy == tuple(sum(durations[a.kind, a.stage] for a in actions) for actions in schedule)
    assert [e.action for e in found.events if e.rank == 0] == list(schedule[0])


def test_simulate_counts_memory_held_between_backward_parts() -> None:
    """Tensors held between the two parts of backward count with the memory that they take."""
    schedule = make("zero-bubble", 4, 8)
    durations: dict[Any, float] = {(kind, stage): 1.0 for kind in "FIW" for stage in range(4)}
    held: dict[Any, float] = {("F", stage): 10.0 for stage in range(4)} | {("I", stage): 1.0 for stage in range(4)}
    assert simulate(schedule, durations, held=held).peak == (40.0, 31.0, 22.0, 13.0)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    waiting = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 0, 1), Action("B", 0, 1)))
    with pytest.raises(
        Deadlock, match="rank 0 at B of micro-batch 0 in stage 0 waits for F of micro-batch 0 in stage 0"
    ):
        timed(waiting)


# ---- the order of messages, for networks that match them by order alone


@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 9), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_comm_plan_in_order_messages_never_deadlock(name: ScheduleName, ranks: int, micros: int, random: Any) -> None:
    """Each rank has one queue, sends and receives alike, in which nothing overtakes; an action waits for its messages
    and its messages for it."""
    schedule = make(name, ranks, micros)
    stages = ranks * (2 if name == "interleaved" else 1)
    edges = [(s, t) for s in range(stages) for t in range(s + 1, stages) if t == s + 1 or random.random() < 0.3]
    routes = [CommPlan(schedule, [StageTransfer(f"{s}.{t}", s, t) for s, t in edges], place) for place in range(ranks)]
    queues = [
        [m for m in route.order if place in (route.sender(m), route.receiver(m))] for place, route in enumerate(routes)
    ]
    acted, done = [0] * ranks, set[StageMessage]()
    moved = True
    while moved:
        moved = False
        for place, route in enumerate(routes):
            while acted[place] < len(schedule[place]) and all(
                m in done or route.is_local(m) for m in route.needs(schedule[place][acted[place]])
            ):
                acted[place] += 1
                moved = True
            if queues[place]:
                m = queues[place][0]
                peer = route.sender(m) + route.receiver(m) - place
                if queues[peer][0] == m and acted[route.sender(m)] > route.sent_at[m]:
                    done.add(queues[place].pop(0))
                    queues[peer].pop(0)
                    moved = True
    assert acted == list(map(len, schedule))
    assert not any(queues)


# ---- mistakes


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("1f1", 2, 2, 2), "did you mean '1f1b'?"),
        (("1f1b", 4, 2, 2), "use 2 stages or 4 ranks, or schedule='interleaved'"),
        (("zero-bubble", 5, 2, 2), "5 stages for 2 ranks: use 2 stages or 5 ranks"),
        (("interleaved", 4, 4, 2), "use 8 or 12 stages, or schedule='1f1b'"),
        (("interleaved", 6, 4, 2), "use 8 or 12 stages, or a number of ranks among 1, 2, 3"),
        (("gpipe", 2, 2, 0), "a pipeline cannot have 0 micro-batches"),
    ],
)
def test_what_cannot_be_is_one_line_with_what_would_be(given: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_schedule(*given)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)
