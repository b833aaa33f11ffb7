"""Sizes of the mesh axes, from the marks on a model, the cluster, and the number of ranks. Pure functions."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from echelon.base.errors import UsageError
from echelon.strategy.annotations.marks import Pipeline


class NearestMeshShape(NamedTuple):
    """The nearest shape of one copy of the model, if the requested shape does not fit the number of ranks."""

    stage: int
    split: int
    requested: str  #: the requested shape, as text


def find_axes(
    stages: int, pipeline: Pipeline | None, splits: bool, slice_size: int | None, ranks: int
) -> dict[str, int]:
    """Return the sizes of the axes. Raises ``UsageError`` if the ranks cannot be arranged so.

    One copy of the model takes ``slice_size`` ranks; if that is None, splits take all ranks. On one rank, nothing is
    split or staged, and the numerical results are the same.
    """
    if ranks == 1:
        return {"replicate": 1}
    size = slice_size or (ranks if splits else None)
    along = _stage_ranks(stages, pipeline, size)
    across = _split_ranks(along, splits, size, ranks)
    needed = along * across
    if ranks % needed:
        raise UsageError(
            f"one copy of the model takes {needed} ranks ({words(along, across)}), and {ranks} is not a multiple of "
            f"that; start {_near(ranks, needed)} processes"
        )
    mesh = {"replicate": ranks // needed, "stage": along, "split": across}
    return {axis: count for axis, count in mesh.items() if count > 1 or axis == "replicate"}


def requested_slice(split: int | None, stages: int, pipeline: Pipeline | None) -> int | None:
    """Return the number of ranks of one copy of the model that ``Strategy(split=...)`` asks for; None without it."""
    return None if split is None else split * _stage_ranks(stages, pipeline, None)


def refit(
    stages: int, pipeline: Pipeline | None, splits: bool, slice_size: int | None, ranks: int
) -> NearestMeshShape | None:
    """Return the nearest shape if ``find_axes`` finds none for these ranks; None if it finds one.

    The shape uses every rank. The split size is kept in preference to the number of stages; if ``slice_size`` is None,
    the split takes the ranks that the stages leave. A smaller split size divides the requested one, because a layer
    that can be cut in 4 can be cut in 2.
    """
    whole_slices = ranks == 1 or ranks % (slice_size or 1) == 0
    with contextlib.suppress(UsageError):
        if find_axes(stages, pipeline, splits, slice_size, ranks) and whole_slices:
            return None
    places = _possible_places(stages, pipeline)
    if splits and slice_size is None:
        stage = max(count for count in places if ranks % count == 0)
        return NearestMeshShape(stage, ranks // stage, f"{words(places[0], 1)} split over equally many")
    requested = find_axes(stages, pipeline, splits, slice_size, slice_size) if slice_size else {"stage": places[0]}
    along, across = requested.get("stage", 1), requested.get("split", 1)
    splittings = [count for count in range(1, across + 1) if across % count == 0]
    split, stage = max(
        (split, stage) for split in splittings for stage in places if stage <= along and ranks % (stage * split) == 0
    )
    return NearestMeshShape(stage, split, words(along, across))


def _possible_places(stages: int, pipeline: Pipeline | None) -> list[int]:
    """Return the possible numbers of ranks along the stage axis, the largest first."""
    if pipeline is None or pipeline.schedule != "interleaved":
        return list(range(stages, 0, -1))
    most = _stage_ranks(stages, pipeline, None)
    return [count for count in range(most, 0, -1) if stages % count == 0]


def _stage_ranks(stages: int, pipeline: Pipeline | None, size: int | None) -> int:
    if pipeline is None or pipeline.schedule != "interleaved":
        return stages
    for ranks in range(stages // 2, 1, -1):
        if stages % ranks == 0 and (size is None or size % ranks == 0):
            return ranks
    raise UsageError(
        f"an interleaved schedule puts two or more stages on each of two or more ranks, and {stages} stages cannot be "
        "dealt out so; make 4, 6 or 8 of them, or use schedule='1f1b'"
    )


def _split_ranks(along: int, splits: bool, size: int | None, ranks: int) -> int:
    if size is None:
        return 1
    if size % along:
        raise UsageError(f"{along} stages cannot share {size} ranks evenly; use {_near(size, along)}")
    across = size // along
    if across > 1 and not splits:
        raise UsageError(
            f"a slice of {size} ranks was asked for, but the marks fill only {along} ({words(along, 1)}); mark "
            f"something split, or take a slice of {along}"
        )
    return min(across, ranks)


def words(along: int, across: int) -> str:
    """Describe the shape of one copy of the model.

    along:  ranks along the stage axis
    across: ranks along the split axis
    """
    parts = [f"{along} stages" if along > 1 else "", f"split over {across}" if across > 1 else ""]
    return " x ".join(part for part in parts if part) or "one whole model a rank"


def _near(count: int, needed: int) -> str:
    below = count // needed * needed
    return " or ".join(str(number) for number in (below, below + needed) if number)
