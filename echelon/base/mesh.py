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
