"""How large each axis of the mesh is: from the marks on a model, the cluster, and the number of ranks. Pure."""

from __future__ import annotations

from echelon.errors import UsageError
from echelon.marks import Pipeline


def find_axes(
    stages: int, pipeline: Pipeline | None, splits: bool, slice_size: int | None, ranks: int
) -> dict[str, int]:
    """Sizes of the axes. One copy of the model takes ``slice_size`` ranks; without a word about it, splits take all.

    On one rank everything runs in one process: the same numbers, nothing cut.
    """
    if ranks == 1:
        return {"replicate": 1}
    size = slice_size or (ranks if splits else None)
    along = _stage_ranks(stages, pipeline, size)
    across = _split_ranks(along, splits, size, ranks)
    needed = along * across
    if ranks % needed:
        raise UsageError(
            f"one copy of the model takes {needed} ranks ({_words(along, across)}), and {ranks} is not a multiple of "
            f"that; start {_near(ranks, needed)} processes"
        )
    mesh = {"replicate": ranks // needed, "stage": along, "split": across}
    return {axis: count for axis, count in mesh.items() if count > 1 or axis == "replicate"}


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
        raise UsageError(f"{along} stages cannot share {size} ranks evenly; {_near(size, along)} would do")
    across = size // along
    if across > 1 and not splits:
        raise UsageError(
            f"a slice of {size} ranks was asked for, but the marks fill only {along} ({_words(along, 1)}); mark "
            f"something split, or take a slice of {along}"
        )
    return min(across, ranks)


def _words(along: int, across: int) -> str:
    parts = [f"{along} stages" if along > 1 else "", f"split over {across}" if across > 1 else ""]
    return " x ".join(part for part in parts if part) or "one whole model a rank"


def _near(count: int, needed: int) -> str:
    below = count // needed * needed
    return " or ".join(str(number) for number in (below, below + needed) if number)
