"""The device mesh: arithmetic of ranks along named axes. Process groups are made from it elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

#: From outermost to innermost: ranks of one split group are adjacent, so they share a host if possible.
AXES = ("replicate", "stage", "split")


def coordinates(mesh: Mapping[str, int], order: Sequence[int], rank: int) -> dict[str, int]:
    """Return the coordinate of ``rank`` along every axis. ``order`` lists the ranks by position in the mesh."""
    place = order.index(rank) if order else rank
    result: dict[str, int] = {}
    for axis in reversed(AXES):
        place, result[axis] = divmod(place, mesh.get(axis, 1))
    return {axis: result[axis] for axis in AXES}


def rank_groups(mesh: Mapping[str, int], order: Sequence[int], axes: Sequence[str]) -> list[list[int]]:
    """Return all groups of ranks that differ along ``axes`` only, each in mesh order. The groups cover every rank."""
    sizes = [mesh.get(axis, 1) for axis in AXES]
    places = list(order) or list(range(math.prod(sizes)))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, where in zip(places, itertools.product(*map(range, sizes)), strict=True):
        fixed = tuple(at for axis, at in zip(AXES, where, strict=True) if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


def parts_of_axis(lines: Sequence[Sequence[int]], size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ``size`` consecutive ranks along an axis, and the groups across them.

    lines: the groups of ranks along the axis, each in mesh order
    """
    inside = [list(line[begin : begin + size]) for line in lines for begin in range(0, len(line), size)]
    across = [list(line[place::size]) for line in lines for place in range(size)]
    return inside, across
