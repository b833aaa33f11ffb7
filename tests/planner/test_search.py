"""The search: against brute force where that is possible, and against what must be so where it is not."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.cost.predict import CostModel, predict
from echelon.planner.cost.system import ECHELON
from echelon.planner.model_costs import Kernel, ModelCosts, ModelUnit, SplitCollective, UnitPass
from echelon.planner.plan_search.meshes import find_micro_batches
from echelon.planner.plan_search.search import search
from echelon.planner.plan_search.search_result import TIE
from echelon.planner.plan_search.shares import share_out
from echelon.planner.plan_search.stage_partition import StageMemoryLimits, cut, slowest, sums

INSIDE = Link("inside", 100e9, 2e-6)
NETWORK = Link("network", 10e9, 1e-5)


def device(name: str = "fast", speed: float = 1.0, memory: float = 80e9) -> Device:
    return Device(name, {"float32": speed * 20e12, "bfloat16": speed * 80e12}, memory, speed * 1e12)


def machines(*hosts: tuple[int, int, Device]) -> Cluster:
    """Make a cluster of (hosts, devices in each, device)."""
    return Cluster(tuple((count, Host((kind,) * size, INSIDE)) for count, size, kind in hosts), NETWORK)


class Blocks:
    """Layers of given width, one after another; those of one width are one object."""

    def __init__(self, widths: tuple[int, ...], rows: int = 512, splits: int = 1) -> None:
        self.name, self.widths, self.rows, self.splits, self.batch = "blocks", widths, rows, splits, 1
        self.names = tuple(f"layers.{at}" for at in range(len(widths)))
        self.ties: tuple[tuple[int, ...], ...] = ()
        self._sheets: dict[tuple[int, int, str | None], ModelCosts] = {}

    def sheet(self, samples: int, split: int = 1, amp: str | None = None) -> ModelCosts:
        key = (samples, split, amp)
        if key not in self._sheets:
            made = {width: self._unit(width, *key) for width in set(self.widths)}
            self._sheets[key] = ModelCosts(tuple(made[width] for width in self.widths), samples, split, amp)
        return self._sheets[key]

    def _unit(self, width: int, samples: int, split: int, amp: str | None) -> ModelUnit:
        rows, kind, size = samples * self.rows, "bfloat16" if amp else "float32", 2 if amp else 4
        edge = float(rows * self.widths[0] * size)
        product = Kernel(
            "product",
            8.0 * rows * width * width / split,
            4.0 * width * width / split,
            (1.0, rows, width, width / split),
            kind,
            2,
        )
        messages = (SplitCollective("all_reduce", edge, 1),) if split > 1 else ()
        weights = 8.0 * width * width / split
        return ModelUnit(
            f"width {width}",
            UnitPass((product,), messages),
            UnitPass((product, dataclasses.replace(product, for_weights=True)), messages),
            weights=weights,
            trained=weights,
            weight_bytes=4 * weights,
            largest_weight=2 * weights,
            saved=edge * (2 + 8 / split),
            received=edge,
            output=edge,
            forward_peak=edge,
            backward_peak=2 * edge,
        )


# ---- cuts ----


@st.composite
def cutting(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[float]]:
    units, stages = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 9), min_size=units, max_size=units)
    seconds = [draw(numbers) for _ in range(stages)]
    held = [draw(numbers) for _ in range(stages)]
    return seconds, held, draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages))  # type: ignore[return-value]


@settings(max_examples=200, deadline=None)
@given(cutting(), st.booleans())
def test_cuts_minimize_the_slowest_stage_among_cuts_that_fit(
    case: tuple[list[list[float]], list[list[float]], list[float]], limited: bool
) -> None:
    seconds, held, limits = case
    units, stages = len(seconds[0]), len(seconds)

    def parts(values: list[list[float]], cuts: tuple[int, ...]) -> list[float]:
        bounds = (0, *cuts, units)
        return [sum(values[at][bounds[at] : bounds[at + 1]]) for at in range(stages)]

    every = itertools.combinations(range(1, units), stages - 1)
    fitting = [
        cuts for cuts in every if not limited or all(a <= b for a, b in zip(parts(held, cuts), limits, strict=True))
    ]
    room = StageMemoryLimits([sums(row) for row in held], limits) if limited else None
    found = cut([sums(row) for row in seconds], room)
    if not fitting:
        assert found is None
        return
    assert found in fitting
    best = min(max(parts(seconds, cuts)) for cuts in fitting)
    assert max(parts(seconds, found)) == pytest.approx(best)
    assert slowest([sums(row) for row in seconds], found) == pytest.approx(best)


def test_what_need_not_be_uneven_is_cut_evenly() -> None:
    assert cut([sums([1.0] * 10)] * 4) == (2, 4, 7)  # 2, 2, 3, 3: the slowest has 3 in any way


# ---- shares ----


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
def test_shares_are_the_quickest_of_all_within_the_limits(total: int, speeds: list[int], most: list[int]) -> None:
    limits = most[: len(speeds)]
    every = [shares for shares in itertools.product(*(range(limit + 1) for limit in limits)) if sum(shares) == total]
    found = share_out(total, [float(speed) for speed in speeds], limits)
    if not every:
        assert found is None
        return
    assert found in every

    def time(shares: tuple[int, ...]) -> float:
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    assert time(found) == pytest.approx(min(map(time, every)))


@given(st.integers(1, 5000))
def test_micro_batch_counts_are_the_least_for_their_size(samples: int) -> None:
    """No count of micro-batches could be less with micro-batches as large."""
    counts = find_micro_batches(samples)
    assert counts[0] == 1
    assert counts[-1] == samples or samples > 4096 or samples == 1
    for count in counts[1:]:
        assert math.ceil(samples / count) < math.ceil(samples / (count - 1))


# ---- the whole ----


def all_drafts(model: Blocks, devices: int, batch: int) -> Iterator[Draft]:
    """Every plan there is, cut in every way, recomputed in every way."""
    units = len(model.names)
    for replicate, stage, split in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if replicate * stage * split > devices or split > model.splits:
            continue
        schedules = [(None, 1)] if stage == 1 else [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)]
        for (schedule, chunks), micros in itertools.product(schedules, (1, 2, 4)):
            if stage * chunks > units or micros > batch // replicate:
                continue
            for cuts in itertools.combinations(range(1, units), stage * chunks - 1):
                for flags in itertools.product((False, True), repeat=stage * chunks):
                    for shard in (0, 1, 2, 3) if replicate > 1 else (0,):
                        mesh = {"replicate": replicate, "stage": stage, "split": split, "chunks": chunks}
                        recompute = flags if any(flags) else ()
                        made = {"cuts": cuts, "schedule": schedule, "recompute": recompute, "shard": shard}
                        yield Draft(batch=batch, micro_batches=micros, **mesh, **made)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [80e9, 2.0e9, 1.0e9])
def test_no_plan_of_a_tiny_model_is_quicker_than_the_one_found(memory: float) -> None:
    model = Blocks((2048, 1024, 2048, 3072), splits=2)
    cluster = machines((2, 2, device(memory=memory)))
    costs = CostModel(model, cluster)
    quick = ((costs.predict(draft, simulate=False), draft) for draft in all_drafts(model, 4, 4))
    ranked = sorted(((found.seconds, draft) for found, draft in quick if found.fits), key=lambda pair: pair[0])
    best = min(costs.predict(draft).seconds for _, draft in ranked[:40])
    answer = search(model, cluster, batch=4)
    assert answer.best[0].prediction.fits
    assert answer.best[0].seconds <= best * (1 + TIE)


# ---- memory ----


def test_search_with_less_memory_is_never_quicker_and_saves_more() -> None:
    """A plan for less memory is never quicker, and it uses more of the means that save memory."""
    model = Blocks((2048,) * 6, splits=2)
    plans = []
    for memory in (80e9, 3e9, 1.5e9, 1.1e9, 0.8e9):
        answer = search(model, machines((2, 2, device())), batch=16, memory=memory)
        if answer.best:
            assert all(choice.prediction.fits for choice in answer.best)
            assert all(held.limit == memory for held in answer.best[0].prediction.memory)
            plans.append(answer.best[0])
    assert len(plans) >= 3
    assert all(first.seconds <= second.seconds * (1 + TIE) for first, second in itertools.pairwise(plans))
    most, least = plans[0].draft, plans[-1].draft
    assert not any(most.recompute)

    def saves(draft: Draft) -> int:
        return draft.shard + draft.stage + draft.split + draft.micro_batches + sum(draft.recompute)

    assert saves(least) > saves(most)


def test_only_stages_that_are_too_full_recompute() -> None:
    """The first stages of a pipeline hold the most micro-batches."""
    model = Blocks((1024,) * 8, rows=4096)
    fixed = {"stage": 4, "split": 1, "replicate": 1, "schedule": "1f1b", "micro_batches": 8}
    found = [
        search(model, machines((1, 4, device())), batch=8, memory=memory, fixed=fixed).best
        for memory in (2e9, 1.2e9, 1.0e9, 0.9e9, 0.8e9, 0.7e9, 0.6e9)
    ]
    partly = [best[0].draft for best in found if best and any(best[0].draft.recompute)]
    assert partly
    some = [draft.recompute for draft in partly if not all(draft.recompute)]
    assert some
    for flags in some:
        assert flags == tuple(sorted(flags, reverse=True))  # the first ones, and no others


def test_where_nothing_fits_it_says_what_lacks_and_what_would_do() -> None:
    model = Blocks((8192,) * 4, splits=2)
    answer = search(model, machines((1, 2, device(memory=8e9))), batch=8)
    assert answer.best == ()
    assert answer.nearest is not None
    assert not answer.nearest.prediction.fits
    words = answer.nearest.reason
    assert " of 8" in words
    assert "would do" in words
    assert "\n" not in words
    count = int(words.split(" more host")[0].split()[-1])
    assert search(model, machines((1 + count, 2, device(memory=8e9))), batch=8).best
    assert not search(model, machines((count, 2, device(memory=8e9))), batch=8).best


def test_low_memory_is_named_where_it_would_fit() -> None:
    model, draft = Blocks((4096,) * 6), Draft(batch=8, amp="bf16", recompute=(True,))
    costs = CostModel(model, machines((1, 1, device())), ECHELON, "adam")
    needed = costs.memory(draft, costs.placement(draft), low_memory=True)[0].total
    for part, named in ((1.02, True), (0.98, False)):
        answer = search(model, machines((1, 1, device(memory=part * needed))), batch=8, optimizer="adam")
        assert answer.nearest is not None
        assert ("or Strategy(low_memory=True, recompute=True), which rounds" in answer.nearest.reason) is named


# ---- devices of several kinds ----


def test_a_slower_kind_gets_fewer_samples() -> None:
    model = Blocks((2048,) * 4)
    cluster = machines((1, 2, device("fast", 3.0)), (1, 2, device("slow", 1.0)))
    fixed = {"replicate": 4, "stage": 1, "split": 1}
    best = search(model, cluster, batch=128, fixed=fixed).best[0]
    assert len(best.draft.shares) == 4
    assert sum(best.draft.shares) == 128
    assert best.draft.shares[0] == pytest.approx(3 * best.draft.shares[3], rel=0.15)
    even = CostModel(model, cluster).predict(best.draft.replaced(shares=()))
    assert even.seconds > 1.2 * best.seconds


@pytest.mark.parametrize("memory", [80e9, 5e9, 4e9])
def test_shares_are_capped_by_each_kind_of_memory(memory: float) -> None:
    """A fast kind with little memory gets no more samples than it holds, and the plan is still taken."""
    model = Blocks((2048,) * 4, rows=512)
    fast, slow = device("fast", 3.0, memory=memory), device("slow", 1.0, memory=80e9)
    fixed = {"replicate": 4, "stage": 1, "split": 1, "micro_batches": 1, "recompute": (), "shard": 0}
    cluster = machines((1, 2, fast), (1, 2, slow))
    answer = search(model, cluster, batch=32, fixed=fixed)
    assert answer.best
    best = answer.best[0]
    assert sum(best.draft.shares) == 32
    assert best.prediction.fits
    costs = CostModel(model, cluster)
    more = (best.draft.shares[0] + 1) * 4
    alone = best.draft.replaced(batch=int(more), shares=())
    by_speed = share_out(32, [3.0, 3.0, 1.0, 1.0])
    assert by_speed is not None
    assert (memory == 4e9) == (best.draft.shares[0] < by_speed[0] - 1)
    if memory == 4e9:
        assert not costs.replica_memory(alone, [fast.memory])[0].fits  # one sample more would be too much


def test_each_kind_of_device_is_held_to_its_own_memory() -> None:
    """The large share of a device with much memory is not compared with the memory of another."""
    model = Blocks((2048,) * 4, rows=512)
    large, small = device("large", 3.0, memory=80e9), device("small", 1.0, memory=4e9)
    fixed = {"replicate": 2, "stage": 1, "split": 1, "micro_batches": 1, "recompute": (), "shard": 0}
    best = search(model, machines((1, 1, large), (1, 1, small)), batch=16, fixed=fixed).best[0]
    assert best.draft.shares[0] > 2 * best.draft.shares[1]
    assert best.prediction.fits


def test_the_first_stages_are_on_the_devices_with_most_memory() -> None:
    model = Blocks((4096,) * 6, rows=2048)
    small, large = device("small", memory=6e9), device("large", memory=24e9)
    fixed = {"replicate": 1, "stage": 2, "split": 1, "schedule": "1f1b"}
    best = search(model, machines((1, 1, small), (1, 1, large)), batch=8, fixed=fixed).best[0]
    assert best.draft.order == (1, 0)  # rank 1 has the large one
    assert best.draft.cuts[0] > 3  # and most of the model
    assert best.prediction.fits


def test_hosts_share_state_inside_where_the_network_is_slow() -> None:
    """Gathers stay inside hosts (HSDP), if its memory allows; the numbers are those of a prediction by hand."""
    model = Blocks((4096,) * 8)
    fixed = {"stage": 1, "split": 1, "replicate": 32, "micro_batches": 1}
    found = {}
    for memory in (14e9, 5e9, 3.5e9):
        cluster = dataclasses.replace(machines((4, 8, device(memory=memory))), network=Link("slow", 2e9, 1e-5))
        found[memory] = search(model, cluster, batch=64, fixed=fixed).best[0]
        assert found[memory].prediction.fits
    assert [(each.draft.shard, each.draft.within) for each in found.values()] == [(1, 0), (3, 8), (3, 0)]
    assert found[14e9].seconds < found[5e9].seconds < found[3.5e9].seconds


def test_groups_of_replicas_take_the_time_of_both_networks() -> None:
    model, cluster = Blocks((4096,) * 8), machines((4, 8, device()))
    alone, groups, whole = (
        predict(model, cluster, Draft(batch=64, replicate=32, shard=3, within=within)) for within in (0, 8, 32)
    )
    assert whole.seconds == alone.seconds
    assert groups.memory[0].total > alone.memory[0].total
    faster = dataclasses.replace(cluster, network=Link("fast", 100e9, 1e-6))
    assert predict(model, faster, groups_of(8)).seconds < groups.seconds  # sums between hosts count too
    shuffled = tuple(range(32))
    assert predict(model, cluster, groups_of(8, shuffled)).seconds == pytest.approx(groups.seconds)


def groups_of(within: int, order: tuple[int, ...] = ()) -> Draft:
    return Draft(batch=64, replicate=32, shard=3, within=within, order=order)


# ---- what is asked for ----


def test_what_is_fixed_stays_and_nothing_is_used_without_consent() -> None:
    model, cluster = Blocks((1024,) * 6, splits=4), machines((1, 4, device()))
    for fixed in ({"split": 2}, {"stage": 2, "micro_batches": 4}, {"shard": 3}, {"schedule": "gpipe", "stage": 2}):
        for choice in search(model, cluster, batch=16, fixed=fixed).best:
            assert all(getattr(choice.draft, name) == value for name, value in fixed.items())
    answer = search(model, cluster, batch=16)
    assert all(not (c.draft.amp or c.draft.comm_dtype or c.draft.approximate) for c in answer.best)
    assert {each.name for each in answer.would_help} >= {"amp"}
    assert all(each.against < 0 for each in answer.would_help)
    allowed = search(model, cluster, batch=16, allow=("amp",)).best[0]
    assert allowed.draft.amp == "bf16"
    assert allowed.seconds < answer.best[0].seconds


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_other_plan_of_an_answer_is_quicker(data: st.DataObject) -> None:
    """Plans that are quicker by less than predictions can tell, and less simple, are listed apart."""
    width, count = data.draw(st.sampled_from((512, 1024, 2048, 4096))), data.draw(st.integers(2, 12))
    model = Blocks(
        (width,) * count, rows=data.draw(st.sampled_from((64, 512, 2048))), splits=data.draw(st.sampled_from((1, 2, 4)))
    )
    memory = data.draw(st.sampled_from((80e9, 4e9, 1e9)))
    hosts = [(data.draw(st.integers(1, 3)), 4, device(memory=memory))]
    if data.draw(st.booleans()):
        hosts.append((1, 4, device("slow", 0.4, memory=2 * memory)))
    answer = search(model, machines(*hosts), batch=data.draw(st.sampled_from((3, 8, 30, 64))))
    if not answer.best:
        return
    first = answer.best[0].seconds
    assert all(choice.seconds >= first for choice in answer.best)
    assert all(first * (1 - TIE) <= choice.seconds < first for choice in answer.as_quick)
    assert all(each.against is None or each.against >= -TIE for each in answer.rejected)


def test_plans_for_all_devices_where_that_is_asked_for() -> None:
    model, cluster = Blocks((256,) * 3), machines((1, 4, device()))
    assert search(model, cluster, batch=2).best[0].draft.ranks <= 2
    asked = search(model, cluster, batch=2, devices=4).best
    assert asked
    assert all(choice.draft.ranks == 4 for choice in asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 4, "allow": ("ampp",)}, "did you mean 'amp'"),
        ({"batch": 4, "fixed": {"splits": 2}}, "did you mean 'split'"),
        ({"batch": 4, "memory": -1.0}, "memory=-1"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")) as error:
        search(Blocks((64,)), machines((1, 1, device())), **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_neighbours_say_why_they_are_not_taken() -> None:
    model = Blocks((2048,) * 8, splits=8)
    answer = search(model, machines((2, 4, device(memory=1.6e9))), batch=64)
    best = answer.best[0]
    by_what = {each.what: each for each in answer.rejected}
    assert len(by_what) == len(answer.rejected) >= 4
    assert all(each.draft != best.draft and each.reason for each in answer.rejected)
    assert all(each.against is None or each.against >= -TIE for each in answer.rejected)
    for each in answer.rejected:
        if each.against is None:
            assert each.prediction is not None
            assert not each.prediction.fits
            assert "needs" in str(each)
        else:
            assert f"{each.against:+.0%}" in str(each)
