"""Predictions of models made by hand, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.plan.prediction import PARTS, Prediction
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.cost.predict import CostModel, predict
from echelon.planner.cost.system import System
from echelon.planner.model_costs import Kernel, ModelCosts, ModelUnit, SplitCollective, UnitPass

FLAT = ((1.0, 1.0), (1e18, 1.0))
DEVICE = Device("flat", {"float32": 1e12}, 1e12, 1e12, launch=0.0, floor=0.0, products=FLAT, streams=FLAT, update=1.0)
SLOW = Device("slow", {"float32": 0.5e12}, 1e12, 1e12, launch=0.0, floor=0.0, products=FLAT, streams=FLAT, update=1.0)
INSIDE, NETWORK = Link("inside", 1e11, 0.0), Link("network", 1e10, 0.0)
PLAIN = System("plain", bucket=1e3, overlap=1.0)
AFTER = System("after", overlap=0.0)

WORK = 1e9  # FLOPs of a unit's forward for one sample: a millisecond on DEVICE
WEIGHTS = 1e6  # entries of a unit


@dataclass
class Chain:
    """Units one after another, all alike; backward is twice forward, half of it for weights."""

    units: int
    messages: float = 0.0  # bytes for one sample, exchanged twice in a unit
    statistics: float = 0.0
    ties: tuple[tuple[int, ...], ...] = ()
    tied: tuple[float, ...] = ()
    splits: int = 8
    batch: int = 8
    name: str = "chain"

    def __post_init__(self) -> None:
        self.names = tuple(f"unit {number}" for number in range(self.units))
        self._sheets: dict[tuple[int, int], ModelCosts] = {}

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts:
        if (samples, split) not in self._sheets:
            work = WORK * samples / split
            exchanged = (SplitCollective("all_reduce", self.messages * samples, 2),) if split > 1 else ()
            back = (Kernel("product", work, 0.0), Kernel("product", work, 0.0, for_weights=True))
            unit = ModelUnit(
                *("unit", UnitPass((Kernel("product", work, 0.0),), exchanged), UnitPass(back, exchanged)),
                weights=WEIGHTS / split,
                trained=WEIGHTS / split,
                weight_bytes=4 * WEIGHTS / split,
                received=1e6 * samples,
                output=1e6 * samples,
                norm_statistics=self.statistics,
            )
            self._sheets[samples, split] = ModelCosts((unit,) * self.units, samples, split, amp, tied=self.tied)
        return self._sheets[samples, split]


def one_host(devices: int = 8, kind: Device = DEVICE) -> Cluster:
    return Cluster(((1, Host((kind,) * devices, INSIDE)),), NETWORK)


def foretell(model: Chain, draft: Draft, *, cluster: Cluster | None = None, **given: object) -> Prediction:
    costs = CostModel(model, cluster or one_host(), given.pop("system", PLAIN), "sgd")  # type: ignore[arg-type]
    return costs.predict(draft, memory=False, **given)  # type: ignore[arg-type]


UPDATE = 3 * 4 * WEIGHTS / 1e12  # of a unit under sgd: read a weight and its gradient, write the weight


def test_one_device_takes_its_work_and_its_update() -> None:
    found = foretell(Chain(4), Draft(batch=8))
    assert found.seconds == pytest.approx(8 * 4 * 3e-3 + 4 * UPDATE)
    assert found.parts["compute"] == pytest.approx(96e-3)


def test_recompute_adds_a_forward_and_micro_batches_add_nothing() -> None:
    found = foretell(Chain(4), Draft(batch=8, micro_batches=4, recompute=(True,)))
    assert found.parts["compute"] == pytest.approx(96e-3)
    assert found.parts["recompute"] == pytest.approx(32e-3)


def test_gradients_wait_for_last_bucket_or_uncovered_rest() -> None:
    """Gradients wait for the last bucket, or for the part of the sum that backward does not cover."""
    size = 4 * 4 * WEIGHTS
    summing = 2 * 7 / 8 * size / 1e11
    covered = foretell(Chain(4), Draft(batch=8, replicate=8))
    assert covered.parts["gradients"] == pytest.approx(summing / (size / 1e3))
    after = foretell(Chain(4), Draft(batch=8, replicate=8), system=AFTER)
    assert after.parts["gradients"] == pytest.approx(summing)
    slow = Cluster(((1, Host((DEVICE,) * 8, Link("slow", 1e9, 0.0))),), NETWORK)
    found = foretell(Chain(4), Draft(batch=8, replicate=8), cluster=slow)
    assert found.parts["gradients"] == pytest.approx(100 * summing - 4 * 2e-3)


def test_sixteen_bits_on_the_wire_take_half() -> None:
    whole = foretell(Chain(4), Draft(batch=8, replicate=8), system=AFTER).parts["gradients"]
    half = foretell(Chain(4), Draft(batch=8, replicate=8, comm_dtype="bf16"), system=AFTER).parts["gradients"]
    assert half == pytest.approx(whole / 2)


def test_shards_scatter_sums_and_gather_weights() -> None:
    half = 7 / 8 * 4 * 4 * WEIGHTS / 1e11
    levels = [
        foretell(Chain(4), Draft(batch=16, replicate=8, micro_batches=2, shard=level), system=AFTER) for level in (1, 2)
    ]
    assert [found.parts["parameters"] for found in levels] == [pytest.approx(half)] * 2
    assert [found.parts["gradients"] for found in levels] == [pytest.approx(half), pytest.approx(2 * half)]
    assert levels[0].parts["update"] == pytest.approx(4 * UPDATE / 8)
    waits = System("waits", overlap=0.0, prefetch=0.0)
    third = foretell(Chain(4), Draft(batch=16, replicate=8, micro_batches=2, shard=3), system=waits)
    assert third.parts["parameters"] == pytest.approx(2 * 2 * half)
    hidden = foretell(Chain(4), Draft(batch=16, replicate=8, micro_batches=2, shard=3), system=AFTER)
    assert hidden.parts["parameters"] == 0.0


def test_a_split_divides_work_and_adds_messages() -> None:
    found = foretell(Chain(4, messages=1e6), Draft(batch=8, split=4))
    assert found.parts["compute"] == pytest.approx(96e-3 / 4)
    assert found.parts["split"] == pytest.approx(4 * 4 * 2 * 3 / 4 * 8e6 / 1e11)
    recomputed = foretell(Chain(4, messages=1e6), Draft(batch=8, split=4, recompute=(True,)))
    assert recomputed.parts["split"] == pytest.approx(1.5 * found.parts["split"])


def test_widths_slow_a_split_down_to_its_widest_part() -> None:
    found = foretell(Chain(4), Draft(batch=8, split=2, widths=(3.0, 1.0)))
    assert found.parts["compute"] == pytest.approx(96e-3 / 2 * 1.5)


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"), [("gpipe", 1, 3 * 6e-3), ("1f1b", 1, 3 * 6e-3), ("interleaved", 2, 3 * 3e-3)]
)
def test_bubbles_are_those_of_the_schedules(schedule: str, chunks: int, bubble: float) -> None:
    draft = Draft(
        *(),
        batch=16,
        stage=4,
        chunks=chunks,
        cuts=tuple(range(8 // (4 * chunks), 8, 8 // (4 * chunks))),
        micro_batches=16,
        schedule=schedule,  # type: ignore[arg-type]
    )
    free = Cluster(((1, Host((DEVICE,) * 8, Link("free", 1e30, 0.0))),), NETWORK)
    found = foretell(Chain(8), draft, cluster=free)
    assert found.parts["compute"] == pytest.approx(16 * 6e-3)
    assert found.parts["bubble"] == pytest.approx(bubble)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("micros", [8, 32, 200])
def test_closed_forms_are_near_the_simulation(schedule: str, micros: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    cuts = tuple(range(8 // (4 * chunks), 8, 8 // (4 * chunks)))
    draft = Draft(batch=micros, stage=4, chunks=chunks, cuts=cuts, micro_batches=micros, schedule=schedule)  # type: ignore[arg-type]
    simulated, closed = (foretell(Chain(8), draft, simulate=way) for way in (True, False))
    assert closed.seconds == pytest.approx(simulated.seconds, rel=0.03)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_long_run_is_the_short_one_repeated(schedule: str) -> None:
    """With events every micro-batch is simulated; without, the steady part is repeated."""
    draft = Draft(batch=61, stage=4, cuts=(1, 3, 6), micro_batches=61, schedule=schedule)  # type: ignore[arg-type]
    whole, repeated = (foretell(Chain(8), draft, events=way) for way in (True, False))
    assert repeated.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert len(whole.events) >= 61 * 4 * 2
    assert repeated.events == ()


def test_what_travels_between_stages_is_exposed() -> None:
    draft = Draft(batch=1, stage=2, cuts=(4,), micro_batches=1, schedule="1f1b")
    found = foretell(Chain(8), draft)
    assert found.parts["pipeline"] == pytest.approx(2 * 1e6 / 1e11)
    across = Cluster(((2, Host((DEVICE,), INSIDE)),), NETWORK)
    assert foretell(Chain(8), draft, cluster=across).parts["pipeline"] == pytest.approx(2 * 1e6 / 1e10)


def test_tied_weights_are_summed_between_their_stages() -> None:
    """Tied weights are summed between the stages that hold them."""
    draft = Draft(batch=2, stage=2, cuts=(4,), micro_batches=2, schedule="1f1b")
    apart = foretell(Chain(8), draft).parts["gradients"]
    tied = foretell(Chain(8, ties=((0, 7),), tied=(1e6,)), draft).parts["gradients"]
    assert tied - apart == pytest.approx(4e6 / 1e11)


def test_the_slowest_replica_counts_and_shares_can_even_it_out() -> None:
    mixed = Cluster(((1, Host((DEVICE,), INSIDE)), (1, Host((SLOW,), INSIDE))), NETWORK)
    even = foretell(Chain(4), Draft(batch=12, replicate=2), cluster=mixed)
    shared = foretell(Chain(4), Draft(batch=12, replicate=2, shares=(2.0, 1.0)), cluster=mixed)
    assert even.parts["compute"] == pytest.approx(6 * 4 * 6e-3)
    assert shared.parts["compute"] == pytest.approx(8 * 4 * 3e-3)


def test_samples_between_whole_numbers_are_between_their_costs() -> None:
    found = foretell(Chain(4), Draft(batch=10, replicate=4))
    assert found.parts["compute"] == pytest.approx(2.5 * 4 * 3e-3)


def test_a_host_that_starts_kernels_slowly_is_a_floor() -> None:
    busy = Device("busy", {"float32": 1e12}, 1e12, 1e12, launch=5e-3, floor=0.0, products=FLAT, streams=FLAT)
    found = foretell(Chain(4), Draft(batch=1), cluster=one_host(1, busy))
    assert found.parts["compute"] + found.parts["host"] == pytest.approx(4 * 3 * 5e-3)


def test_batch_norm_statistics_cost_a_message_each_way() -> None:
    slow = Cluster(((1, Host((DEVICE,) * 8, Link("late", 1e11, 1e-3))),), NETWORK)
    found = foretell(Chain(4, statistics=64), Draft(batch=8, replicate=8), cluster=slow)
    assert found.parts["batch norm"] == pytest.approx(4 * (3e-3 + 2 * 3e-3))


def test_parts_add_up_and_are_the_known_ones() -> None:
    drafts = [
        Draft(batch=16, replicate=2, stage=2, split=2, cuts=(4,), micro_batches=4, schedule="zero-bubble", shard=2),
        Draft(batch=16, replicate=8, shard=3, recompute=(True,)),
        Draft(batch=16, replicate=8, approximate="dgc"),
        Draft(batch=16, replicate=8, approximate="localsgd"),
    ]
    for draft in drafts:
        found = foretell(Chain(8, messages=1e6, statistics=8), draft)
        assert tuple(found.parts) == PARTS
        assert found.seconds == pytest.approx(sum(found.parts.values()))
        assert min(found.parts.values()) >= 0


def test_predict_has_memory_for_every_rank_of_the_stage_axis() -> None:
    """The one-shot form of a prediction has the memory of every rank of the stage axis."""
    draft = Draft(batch=8, stage=2, cuts=(4,), micro_batches=4, schedule="1f1b")
    found = predict(Chain(8), one_host(), draft, optimizer="adam")
    assert len(found.memory) == 2
    assert found.memory[0].limit == 1e12
    assert found.fits


def test_what_cannot_be_is_refused_in_one_line() -> None:
    for draft, words in (
        (Draft(batch=8, replicate=16), "16 devices cannot run on 8"),
        (Draft(batch=8, stage=2, cuts=(9,), micro_batches=2), "do not cut 8 units"),
        (Draft(batch=8, split=16), "split=16: chain can be split over 8 at most"),
    ):
        with pytest.raises(UsageError, match=words) as raised:
            foretell(Chain(8), draft)
        assert "\n" not in str(raised.value)
