"""Slices of a cluster: the order of ranks, checked by arithmetic, and the table of who has what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.base.errors import UsageError
from echelon.engine.device_placement import placement_table
from echelon.strategy.annotations.annotate import annotate, collect, replicate, split, stage
from echelon.strategy.annotations.slices import Slices, cluster, current


def slices(order: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [order[at : at + size] for at in range(0, len(order), size)]


def test_all_are_slices_of_consecutive_ranks() -> None:
    assert cluster().arrange(2, 8, 4) == tuple(range(8))
    assert cluster(average=4).arrange(4, 8, 4) == tuple(range(8))


def test_a_row_is_a_host() -> None:
    order = cluster(row=True).arrange(4, 8, 4)
    assert slices(order, 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_specific_slices_are_kept_as_listed() -> None:
    assert cluster(specific=[[0, 2], [3, 1]]).arrange(2, 4, 2) == (0, 2, 3, 1)


def test_auto_keeps_slices_within_hosts() -> None:
    assert slices(cluster(auto=True).arrange(3, 12, 4), 3) == [(0, 1, 2), (4, 5, 6), (8, 9, 10), (3, 7, 11)]
    assert slices(cluster(auto=True).arrange(4, 8, 2), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_auto_arrange_ranks_once_crosses_hosts_only_if_needed(copies: int, needed: int, per_host: int) -> None:
    """Automatic arrangement uses every rank once and crosses hosts only where it must."""
    order = cluster(auto=True).arrange(needed, copies * needed, per_host)
    assert sorted(order) == list(range(copies * needed))
    whole_hosts = copies * needed // per_host
    intact = sum(len({rank // per_host for rank in one}) == 1 for one in slices(order, needed))
    assert intact >= min(whole_hosts * (per_host // needed), copies)
    if needed % per_host == 0:  # whole hosts only
        assert all(len({rank // per_host for rank in one}) == needed // per_host for one in slices(order, needed))


def test_slice_sizes_that_the_cluster_fixes() -> None:
    assert cluster().slice_size(8) is None
    assert cluster(auto=True).slice_size(8) is None
    assert cluster(average=2).slice_size(8) == 2
    assert cluster(row=True).slice_size(8) == 8
    assert cluster(specific=[[0, 1, 2]]).slice_size(8) == 3


def test_the_innermost_open_cluster_is_current() -> None:
    assert current() == Slices()
    with cluster(average=2) as outer:
        with cluster(row=True):
            assert current().row
        assert current() is outer
    assert current() == Slices()


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (
            lambda: cluster().arrange(4, 6, 6),
            "one copy of the model takes 4 devices and the job has 6: start it with 4 or 8, or let a copy take 1, 2, 3 "
            "or 6",
        ),
        (lambda: cluster().arrange(4, 3, 3), "the job has 3: start it with 4, or let a copy take 1 or 3"),
        (
            lambda: cluster(average=4).arrange(2, 8, 8),
            "cluster(average=4) has slices of 4 devices, but the marks need 2",
        ),
        (lambda: cluster(row=True).arrange(2, 8, 4), "cluster(row=True) has slices of 4 devices, but the marks need 2"),
        (lambda: cluster(row=True).arrange(4, 6, 4), "start it with 4 or 8"),
        (lambda: cluster(average=0), "Slices(average=0): expected 1 or more devices a slice"),
        (lambda: cluster(average=2, row=True), "slices are cut in one way; choose one"),
        (lambda: cluster(specific=[]), "has an empty slice"),
        (lambda: cluster(specific=[[0], []]), "has an empty slice"),
        (lambda: cluster(specific=[[0, 1], [2]]), "has slices of 1 and 2 ranks"),
        (lambda: cluster(specific=[[0, 1], [1, 2]]), "lists rank 1 twice"),
        (lambda: cluster(specific=[[0, 1], [2, 5]]).arrange(2, 4, 4), "lists rank 5, but the job has ranks 0 to 3"),
        (lambda: cluster(specific=[[0, 1]]).arrange(2, 4, 4), "leaves out rank 2 and 3 of 4"),
        (lambda: cluster(specific=[[0, 1], [2, 3]]).arrange(4, 4, 4), "has slices of 2 devices, but the marks need 4"),
    ],
)
def test_clusters_that_do_not_fit(wrong: Callable[[], Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_placement_of_a_hybrid_model() -> None:
    model = nn.ModuleDict({"lower": nn.Linear(2, 2), "upper": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    model["norm"] = nn.LayerNorm(2)
    annotate(model, {"lower": stage(0), "upper": stage(1), "upper.1": split("row"), "norm": replicate()})
    mesh = {"replicate": 2, "stage": 2, "split": 2}
    table = placement_table(collect(model), mesh, cluster().arrange(4, 8, 4), 4)
    assert table == [
        "module      ranks              host:device                        how",
        "lower       0 1 | 4 5          0:0 0:1 | 1:0 1:1                  stage 0",
        "upper       2 3 | 6 7          0:2 0:3 | 1:2 1:3                  stage 1",
        "upper.1     2 3 | 6 7          0:2 0:3 | 1:2 1:3                  stage 1, split row over 2",
        "norm        0 1 2 3 | 4 5 6 7  0:0 0:1 0:2 0:3 | 1:0 1:1 1:2 1:3  replicated",
        "(the rest)  0 1 2 3 | 4 5 6 7  0:0 0:1 0:2 0:3 | 1:0 1:1 1:2 1:3  replicated",
    ]
