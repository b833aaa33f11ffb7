"""Predicted memory of a rank: by hand arithmetic on made-up models, and compared with the peaks of real steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import run

from benchmarks.planner.planner_memory_models import CASES
from benchmarks.planner.planner_memory_worker import measure
from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory
from echelon.plan.schedule import make_schedule
from echelon.plan.simulate import simulate
from echelon.planner.cost.in_flight import _moments_of_rank, moments, moments_of_rank
from echelon.planner.cost.rank_memory import find_peak_moments
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.model_costs import ModelCosts, ModelUnit, UnitPass
from echelon.planner.profiling.profile import Profile, profile

NONE = UnitPass(())
MB = float(2**20)
BATCH = 9.0  # bytes of a micro-batch, of which the first unit keeps 5


@dataclass(frozen=True)
class Model:
    """Units as they are given, whatever the batch is."""

    units: tuple[ModelUnit, ...]
    name: str = "made up"
    ties: tuple[tuple[int, ...], ...] = ()
    tied: tuple[float, ...] = ()
    splits: int = 1
    batch: int = 8
    asked: list[int] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units)

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts:
        self.asked.append(samples)
        return ModelCosts(self.units, samples, split, amp, BATCH, self.tied)


def unit(**figures: float) -> ModelUnit:
    """1,000 weights; keeps 50 bytes, 5 of which came in, hands on 7 and needs 20 more in forward, 30 in backward."""
    weights = figures.pop("trained", 1000)
    usual = {
        "weights": weights, "trained": weights, "weight_bytes": 4 * weights, "largest_weight": 2 * weights,
        "saved": 50, "received": 5, "output": 7, "forward_peak": 70, "backward_peak": 30,
        "backward_whole": 30 + 4 * weights,
    }  # fmt: skip
    return ModelUnit("unit", NONE, NONE, **(usual | figures))


FOUR = Model(tuple(unit() for _ in range(4)))


def memory(model: Any, draft: Draft, *limits: Any, **options: Any) -> list[PredictedMemory]:
    return [one.memory for one in find_peak_moments(model, draft, *limits, **options)]


def total(model: Model, place: Any = "cpu", optimizer: str = "sgd", **options: Any) -> list[float]:
    found = memory(model, Draft(batch=8, **options), optimizer=optimizer, place=place, workspace=0.0)
    return [one.total for one in found]


# ---- moments of long pipelines ----


def test_moments_of_long_1f1b_follow_from_short_ones() -> None:
    for ranks, micros in itertools.product((9, 10, 12, 40), (1, 7, 8, 12, 43, 44, 300)):
        for rank in (0, 1, ranks // 2, ranks - 1):
            behind = ranks - 1 - rank
            count = min(micros, behind + 4)
            walked = _moments_of_rank("1f1b", behind + 1, behind + 1, count, 0, rank > 0)
            assert moments_of_rank("1f1b", ranks, ranks, micros, rank) == walked


# ---- moments of one device ----


def test_forward_lies_beside_gradients_of_the_step_before() -> None:
    model = Model((*FOUR.units[:3], unit(forward_peak=1e6)))
    # weights, old gradients, the rest of the batch, what three units keep, what the last receives, and its peak
    assert total(model) == [16000 + 16000 + 4 + 3 * 50 + 5 + 1e6]


def test_backward_begins_without_gradients_and_adds_them() -> None:
    """Backward begins without gradients and makes them as it goes."""
    late = Model((*FOUR.units[:3], unit(backward_peak=1e6, backward_whole=1e6)))
    assert total(late) == [16000 + 4 + 4 * 50 + 1e6]  # the loss has no output to have a gradient of
    early = Model((unit(backward_peak=1e6, backward_whole=1e6 + 100), *FOUR.units[1:]))
    assert total(early) == [16000 + 4 + 50 + 7 + 3 * 4000 + 1e6 + 100]


def test_update_of_all_weights_at_once_needs_room_for_all() -> None:
    standing = 16000 + 16000 + 2 * 16000 + 4
    assert total(FOUR, "cuda", "adam") == [standing + 16000]
    assert total(FOUR, "cpu", "adam") == [standing + 2 * 2000]  # one after another: two copies of the largest
    (one,) = memory(FOUR, Draft(batch=8), optimizer="adam", place="cuda", workspace=0.0)
    assert (one.parameters, one.gradients, one.optimizer) == (16000, 16000, 32000)
    assert (one.transient, one.activations, one.buffers) == (16000, 0, 4)


def test_micro_batches_add_to_whole_gradients() -> None:
    model = Model((*FOUR.units[:3], unit(backward_peak=1e6, backward_whole=1e6 + 4000)))
    expected = 16000 + 16000 + (4 * 9 - 5) + 4 * 50 + 1e6 + 2000  # a gradient that is added is there twice
    assert total(model, micro_batches=4) == [expected]
    assert model.asked[-1] == 2


def test_recompute_keeps_inputs_and_one_units_set_in_backward() -> None:
    """Recompute keeps the inputs of units, and backward has the saved tensors of one unit at a time."""
    model = Model(tuple(unit(saved=1e5, forward_peak=1e5 + 20, backward_whole=0) for _ in range(4)))
    (kept,) = memory(model, Draft(batch=8), optimizer="sgd", place="cpu")
    (again,) = memory(model, Draft(batch=8, recompute=(True,)), optimizer="sgd", place="cpu")
    assert kept.total == 16000 + 16000 + 4 + 3e5 + 5 + 1e5 + 20
    # the first unit's backward: what it receives, its output's gradient, its set again, all gradients
    assert again.total == 16000 + 16000 + 4 + 5 + 7 + 1e5 + 30
    assert (again.activations, again.gradients) == (5, 16000)


def test_what_code_around_a_recomputed_module_keeps_stays() -> None:
    last = unit(kept=1e6, forward_again=2e6, backward_again=3e6, backward_again_whole=3e6)
    model = Model((*(dataclasses.replace(one, kept=5.0) for one in FOUR.units[:3]), last))
    assert total(model, recompute=(True,)) == [16000 + 4 + 3 * 5 + 1e6 + 3e6]


def test_a_runtime_with_a_master_copy_counts_its_own_bytes() -> None:
    halves = System("halves", amp_weights=2.0, amp_gradients=2.0, amp_master=4.0)
    model = Model(tuple(dataclasses.replace(one, casts=8.0) for one in FOUR.units))
    draft = Draft(batch=8, amp="bf16")
    (one,) = memory(model, draft, system=halves, optimizer="adam", place="cuda", workspace=0.0)
    assert (one.parameters, one.gradients, one.optimizer) == (4000 * 6, 4000 * 2, 4000 * 8)
    (ours,) = memory(model, draft, system=ECHELON, optimizer="adam", place="cuda", workspace=0.0)
    assert (ours.parameters, ours.gradients) == (16000, 16000)
    with pytest.raises(UsageError, match="optimizer='adan'"):
        memory(model, draft, optimizer="adan")


# ---- replicas ----


def test_replicas_hold_buckets_for_ever_and_what_waits_for_them() -> None:
    model = Model(tuple(unit(trained=100_000, backward_whole=30 + 4e5) for _ in range(4)))  # 400 kB of gradients each
    standing = 1.6e6 + 1.6e6  # weights, buckets
    # the second unit's backward: those behind it have made less than the first bucket's MiB, so that all of it waits
    assert total(model, replicate=2) == [standing + 4 + 2 * 50 + 7 + 8e5 + 30 + 4e5]
    # where each makes 1.2 MB, what the three behind the first have made has left, but for what fills no bucket
    large = Model(tuple(unit(trained=300_000, backward_whole=30 + 12e5) for _ in range(4)))
    assert total(large, replicate=2)[0] == pytest.approx(9.6e6 + 4 + 50 + 7 + (3.6e6 - MB) + 30 + 12e5)
    # with several micro-batches all gradients stay whole beside the buckets, and one is there twice
    assert total(model, replicate=2, micro_batches=2) == [standing + 13 + 1.6e6 + 4 * 50 + 30 + 2e5]


@pytest.mark.parametrize("level", [1, 2])
def test_sharding_divides_the_optimizers_part(level: int) -> None:
    (one,) = memory(FOUR, Draft(batch=8, replicate=4, shard=level), optimizer="adam", place="cuda", workspace=0.0)
    assert (one.parameters, one.optimizer) == (16000, 32000 / 4)


def test_shard_3_divides_weights_and_gathers_them_unit_by_unit() -> None:
    model = Model(tuple(unit(forward_peak=1e6) for _ in range(4)))
    (one,) = memory(model, Draft(batch=8, replicate=4, shard=3), optimizer="adam", place="cpu")
    assert (one.parameters, one.gradients, one.optimizer) == (4000, 4000, 8000)
    # the second: its weights, and those of the third that are coming
    assert one.transient == 5 + 1e6 + 4000 + 4000


# ---- pipelines ----


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (2, 8), (4, 8), (4, 7), (3, 30)])
def test_a_rank_holds_what_the_simulated_schedule_holds(name: Any, ranks: int, micros: int) -> None:
    stages = 2 * ranks if name == "interleaved" else ranks
    schedule = make_schedule(name, stages, ranks, micros)
    seconds: Any = {(kind, at): 1.0 for kind in ("F", "B") for at in range(stages)}
    found = simulate(schedule, seconds)
    counted = [max(sum(one.open) + 1 for one in each) for each in moments(name, stages, ranks, micros)]
    assert counted == [round(peak) for peak in found.peak]


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 40)])
def test_zero_bubble_holds_what_waits_for_its_weights_gradients(ranks: int, micros: int) -> None:
    schedule = make_schedule("zero-bubble", ranks, ranks, micros)
    seconds: Any = {(kind, at): 1.0 for kind in ("F", "I", "W") for at in range(ranks)}
    held: Any = {(kind, at): size for kind, size in (("F", 1.0), ("I", 0.25)) for at in range(ranks)}
    found = simulate(schedule, seconds, held=held)
    own = {"F": 1.0, "I": 1.0, "W": 0.25}
    counted = [
        max(sum(one.open) + 0.25 * sum(one.waiting) + own[one.kind] for one in each)
        for each in moments("zero-bubble", ranks, ranks, micros)
    ]
    assert counted == pytest.approx(found.peak)


def test_a_stage_keeps_its_output_and_the_message_of_it() -> None:
    model = Model(tuple(unit(saved=1e6, received=7, forward_peak=1e6, trained=0) for _ in range(4)))
    first, last = total(model, stage=2, cuts=(2,), schedule="1f1b", micro_batches=4)
    batch = 4 * 9 - 7
    # one micro-batch waits, with its output and the message of it; of the other two units' sets are there, and
    # backward has begun; gradients of two outputs are expected
    assert first == batch + 2e6 + 2 * 7 + (2e6 + 7 + 30) + 2 * 7 + 7
    # nothing waits; two messages are expected, and one that was sent back has not been acknowledged
    assert last == batch + (2e6 + 30) + 2 * 7 + 7


def test_a_tied_weight_is_held_once_by_each_rank_that_uses_it() -> None:
    tied = Model(FOUR.units, ties=((0, 3),), tied=(500.0,))
    draft = Draft(batch=8, stage=2, cuts=(2,), schedule="1f1b", micro_batches=2)
    first, last = memory(tied, draft, optimizer="adam", place="cpu")
    assert (first.parameters, last.parameters) == (8000, 8000)
    (alone,) = memory(tied, Draft(batch=8), optimizer="adam", place="cpu")
    assert alone.parameters == 16000 - 2000


def test_limits_are_those_of_the_ranks() -> None:
    draft = Draft(batch=8, stage=2, cuts=(2,), schedule="gpipe", micro_batches=2)
    found = memory(FOUR, draft, (1e9, 100.0))
    assert [one.fits for one in found] == [True, False]
    assert [one.limit for one in memory(FOUR, draft, 5.0)] == [5.0, 5.0]


def test_the_largest_share_of_an_uneven_batch_counts() -> None:
    memory(FOUR, Draft(batch=12, replicate=2, shares=(2.0, 1.0), micro_batches=2))
    assert FOUR.asked[-1] == 4


def test_parts_add_up() -> None:
    for one in memory(FOUR, Draft(batch=8, stage=2, cuts=(1,), schedule="gpipe", micro_batches=4, replicate=2)):
        assert isinstance(one, PredictedMemory)
        parts = [getattr(one, part.name) for part in dataclasses.fields(one) if part.name != "limit"]
        assert one.total == pytest.approx(sum(parts))
        assert min(parts) >= 0


# ---- real steps ----

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches, amp": {"micro_batches": 4, "amp": "bf16"},
    "recompute": {"recompute": (True,)},
    "replicas": {"replicate": 2},
    "shard 3, recompute": {"replicate": 2, "shard": 3, "recompute": (True,)},
    "1f1b": {"stage": 2, "schedule": "1f1b", "micro_batches": 4},
    "zero-bubble": {"stage": 2, "schedule": "zero-bubble", "micro_batches": 4},
}


@functools.cache
def profiled(case: str) -> Profile:
    chosen = CASES[case]
    return profile(chosen.model(), chosen.batch(chosen.samples), loss=chosen.loss, name=case)


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        *(("convnet", name) for name in ("recompute", "shard 3, recompute")),
        *(("transformer", name) for name in ("micro-batches, amp", "replicas", "zero-bubble")),
        *(("unet", name) for name in ("plain", "1f1b")),
    ],
)
def test_real_steps_hold_what_was_foretold(case: str, setting: str) -> None:
    anatomy, options = profiled(case), SETTINGS[setting]
    cuts = (len(anatomy.names) // 2,) if "stage" in options else ()
    draft = Draft(batch=CASES[case].samples * options.get("replicate", 1), cuts=cuts, **options)
    foretold = memory(anatomy, draft, optimizer="adam", place="cpu")
    peaks = [found["peak"] for found in run(measure, case, draft, "adam", anatomy.names, ranks=draft.ranks)]
    for stage, one in enumerate(foretold):
        assert one.total == pytest.approx(max(peaks[stage :: draft.stage]), rel=0.05)
