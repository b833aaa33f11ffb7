"""Sizes of the axes of the mesh, and sizes that are refused."""

from __future__ import annotations

import pytest

from echelon.base.errors import UsageError
from echelon.base.mesh import coordinates, rank_groups
from echelon.plan.axes import find_axes
from echelon.strategy.annotations.marks import Pipeline

PLAIN, WOVEN = Pipeline(), Pipeline(schedule="interleaved")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((1, None, False, None, 4), {"replicate": 4}),
        ((2, PLAIN, False, None, 4), {"replicate": 2, "stage": 2}),
        ((1, None, True, None, 4), {"replicate": 1, "split": 4}),
        ((1, None, True, 2, 4), {"replicate": 2, "split": 2}),
        ((2, PLAIN, True, 4, 8), {"replicate": 2, "stage": 2, "split": 2}),
        ((2, PLAIN, True, None, 8), {"replicate": 1, "stage": 2, "split": 4}),
        ((4, WOVEN, False, None, 4), {"replicate": 2, "stage": 2}),
        ((8, WOVEN, False, None, 4), {"replicate": 1, "stage": 4}),
        ((8, WOVEN, False, 2, 4), {"replicate": 2, "stage": 2}),
        ((4, PLAIN, True, 8, 1), {"replicate": 1}),  # one process runs everything
    ],
)
def test_sizes_of_the_axes(asked: tuple[int, Pipeline | None, bool, int | None, int], expected: dict[str, int]) -> None:
    assert find_axes(*asked) == expected


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ((4, PLAIN, False, None, 6), "one copy of the model takes 4 ranks (4 stages), and 6 is not a multiple of that"),
        ((3, PLAIN, True, 4, 4), "3 stages cannot share 4 ranks evenly; use 3 or 6"),
        ((1, None, False, 2, 4), "a slice of 2 ranks was asked for, but the marks fill only 1"),
        ((2, WOVEN, False, None, 2), "and 2 stages cannot be dealt out so; make 4, 6 or 8 of them"),
    ],
)
def test_what_cannot_be_says_what_would(asked: tuple[int, Pipeline | None, bool, int | None, int], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_axes(*asked)
    assert line in str(caught.value)


def test_neighbours_split_and_far_ranks_replicate() -> None:
    mesh = {"replicate": 2, "stage": 2, "split": 2}
    assert rank_groups(mesh, (), ("split",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rank_groups(mesh, (), ("stage",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rank_groups(mesh, (), ("replicate", "split")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert coordinates(mesh, (), 5) == {"replicate": 1, "stage": 0, "split": 1}
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    assert rank_groups(mesh, order, ("split",))[0] == [7, 6]
    assert coordinates(mesh, order, 7) == {"replicate": 0, "stage": 0, "split": 0}
