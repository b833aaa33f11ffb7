"""Cost of kernels and messages, against arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.planner.fit_constants import FittedConstant, fit, minimize
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.cost.collective_costs import CommGroup, seconds, send_seconds
from echelon.planner.cost.compute import kernel_seconds, tile_part, unit_seconds
from echelon.planner.cost.placement import place
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.model_costs import Kernel, ModelUnit, UnitPass

FLAT = ((1.0, 0.5), (1e15, 0.5))
DEVICE = Device(
    *("flat", {"float32": 1e12, "float16": 4e12}, 16e9, 1e11),
    launch=1e-5,
    floor=2e-6,
    products=FLAT,
    streams=FLAT,
    attention=0.25,
    update=1.0,
)
INSIDE, NETWORK = Link("inside", 1e11, 1e-6), Link("network", 1e10, 1e-5)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (Kernel("product", 1e9, 1e6), 1e9 / 0.5e12),
        (Kernel("product", 1e9, 1e6, dtype="float16"), 1e9 / 2e12),
        (Kernel("product", 1e6, 1e9), 1e9 / 0.5e11),  # bound by memory
        (Kernel("attention", 1e9, 1e6), 1e9 / 0.25e12),
        (Kernel("pointwise", 1e9, 1e8), 1e8 / 0.5e11),  # its FLOPs are hidden behind its bytes
        (Kernel("pointwise", 1, 8), 2e-6),  # no kernel is shorter
    ],
)
def test_kernel_takes_the_longer_of_its_work_and_its_bytes(kernel: Kernel, expected: float) -> None:
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(expected)


def test_a_product_that_fills_a_wave_and_a_bit_takes_two() -> None:
    one = tile_part((1, 256 * 4, 128, 64), cores=4)
    more = tile_part((1, 256 * 5, 128, 64), cores=4)
    assert one == 1.0
    assert (
        more == 0.85
    )  # in smaller tiles, five waves that are full; in large ones it would be two, the second a quarter
    assert tile_part((1, 100, 100, 100), cores=0) == 1.0


def test_unit_sums_its_launches_and_fusing_leaves_fewer_bytes() -> None:
    """A unit takes the sum of its launches, and fusing leaves a part of the bytes."""
    forward = UnitPass((Kernel("product", 1e9, 1e6), Kernel("pointwise", 0, 1e8, count=3)))
    backward = UnitPass((Kernel("product", 1e9, 1e6), Kernel("product", 1e9, 1e6, for_weights=True)))
    plain = unit_seconds(ModelUnit("unit", forward, backward), DEVICE, ECHELON)
    assert plain.forward == pytest.approx(2e-3 + 3 * 2e-3)
    assert (plain.backward, plain.for_weights) == (pytest.approx(4e-3), pytest.approx(2e-3))
    assert (plain.forward_host, plain.backward_host) == (pytest.approx(4e-5), pytest.approx(2e-5))
    fused = unit_seconds(ModelUnit("unit", forward, backward), DEVICE, System("fused", pointwise=0.5))
    assert fused.forward == pytest.approx(2e-3 + 3 * 1e-3)


def test_collectives_inside_a_host_have_their_closed_forms() -> None:
    group = CommGroup(4, INSIDE, NETWORK)
    assert seconds("all_reduce", 1e8, group) == pytest.approx(2 * 3 / 4 * 1e8 / 1e11)
    assert seconds("all_reduce", 8, group) == pytest.approx(2 * 2 * 1e-6)  # two rounds of a tree, there and back
    halves = seconds("all_gather", 1e8, group) + seconds("reduce_scatter", 1e8, group)
    assert seconds("all_reduce", 1e8, group) == pytest.approx(halves)
    assert seconds("all_reduce", 1e8, CommGroup(1, INSIDE, NETWORK)) == 0.0
    assert send_seconds(1e8, INSIDE) == pytest.approx(1e-3 + 1e-6)


def test_groups_across_hosts_share_the_network() -> None:
    one_each = CommGroup(4, INSIDE, NETWORK, hosts=4, sharing=8)
    assert seconds("all_reduce", 1e8, one_each) == pytest.approx(2 * 3 / 4 * 1e8 / (1e10 / 8))
    whole_hosts = CommGroup(32, INSIDE, NETWORK, hosts=4)
    between = 2 * 3 / 4 * 1e8 / 1e10
    assert seconds("all_reduce", 1e8, whole_hosts) == pytest.approx(between + 2 * 3 * 1e-6)
    ports = Link("eight ports", 1e10, 1e-5, rails=8)
    lonely = CommGroup(4, INSIDE, ports, hosts=4)
    assert seconds("all_reduce", 1e8, lonely) == pytest.approx(2 * 3 / 4 * 1e8 / (1e10 / 8))


def test_measured_tables_come_before_formulas() -> None:
    table = {("all_reduce", 4): ((1e3, 1e-4), (1e6, 1e-3), (1e8, 5e-2))}
    group = CommGroup(4, Link("measured", 1e11, 1e-6, table), NETWORK)
    assert seconds("all_reduce", 10, group) == pytest.approx(1e-4)
    assert seconds("all_reduce", 1e6, group) == pytest.approx(1e-3)
    assert seconds("all_reduce", 50.5e6, group) == pytest.approx((1e-3 + 5e-2) / 2)
    assert seconds("all_reduce", 2e8, group) == pytest.approx(1e-1)
    more = seconds("all_reduce", 1e8, CommGroup(8, Link("measured", 1e11, 1e-6, table), NETWORK))
    assert more == pytest.approx(5e-2 * (7 / 8) / (3 / 4), rel=0.01)


def test_a_mesh_is_placed_split_first_then_stage_then_replicate() -> None:
    cluster = Cluster(((4, Host((DEVICE,) * 8, INSIDE)),), NETWORK)
    found = place(Draft(batch=8, replicate=4, stage=2, split=4, cuts=(1,)), cluster)
    assert (found.split.hosts, found.replicate.hosts, found.replicate.sharing) == (1, 4, 8)
    assert found.edges[0].link is INSIDE
    found = place(Draft(batch=8, replicate=2, stage=4, split=4, cuts=(1, 2, 3)), cluster)
    assert [edge.link is NETWORK for edge in found.edges] == [False, True, False, True]
    assert found.edges[1].sharing == 4
    found = place(Draft(batch=8, replicate=2, split=16), cluster)
    assert (found.split.hosts, found.split.on_host, found.split.sharing) == (2, 8, 1)


def test_place_by_looking_at_every_rank_equals_arithmetic() -> None:
    """Looking at every rank finds the same places as arithmetic."""
    cluster = Cluster(((4, Host((DEVICE,) * 8, INSIDE)),), NETWORK)
    for sizes in ((32, 1, 1), (4, 2, 4), (2, 4, 4), (2, 1, 16), (1, 32, 1), (8, 2, 2), (2, 16, 1)):
        draft = Draft(batch=32, replicate=sizes[0], stage=sizes[1], split=sizes[2], cuts=tuple(range(1, sizes[1])))
        short, long = place(draft, cluster), place(draft.replaced(order=tuple(range(32))), cluster)
        assert short.split == long.split
        assert short.replicate == long.replicate
        assert short.edges[: sizes[1] - 1] == long.edges[: sizes[1] - 1]


def test_mixed_devices_make_replicas_of_several_kinds() -> None:
    slow = Device("slow", {"float32": 1e11}, 8e9, 1e10)
    hosts = ((1, Host((DEVICE,) * 2, INSIDE)), (1, Host((slow,) * 2, INSIDE)))
    found = place(Draft(batch=8, replicate=4, shares=(3.0, 3.0, 1.0, 1.0)), Cluster(hosts, NETWORK))
    assert [(kind.workers[0][0][0].name, kind.share) for kind in found.replicas] == [("flat", 1.5), ("slow", 0.5)]


def test_the_simplex_finds_a_minimum_and_fitting_finds_constants() -> None:
    lowest = minimize(lambda at: float(abs(at[0] - 1) + (at[1] + 2) ** 2), np.zeros(2), 200)
    assert lowest == pytest.approx([1, -2], abs=1e-3)
    sizes = np.array([1e3, 1e5, 1e7, 1e9])
    measured = 3e-5 + sizes / 2e9
    known = {"latency": FittedConstant(1e-5, 1.0), "bandwidth": FittedConstant(1e9, 1.0)}
    found = fit(known, lambda c: list(c["latency"] + sizes / c["bandwidth"]), list(measured), 300)
    assert math.isclose(found["latency"], 3e-5, rel_tol=0.02)
    assert math.isclose(found["bandwidth"], 2e9, rel_tol=0.02)


def test_an_optimizer_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'adam'"):
        ECHELON.state_bytes("adan")
    assert ECHELON.update_bytes("adam", None) == 28
