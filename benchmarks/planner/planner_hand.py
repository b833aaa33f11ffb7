"""All plans that one would set by hand for so many ranks: every mesh, schedule, count of micro-batches, shard level.

Stages are cut by arithmetic, and where there are two also one unit to either side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

from echelon.plan.draft import Draft
from echelon.planner.model_costs import ProfileLike
from echelon.planner.plan_search.stage_partition import cut, sums
from echelon.strategy.annotations.marks import ScheduleName


def by_hand(found: ProfileLike, ranks: int, rows: int) -> list[Draft]:
    drafts = [draft for mesh in _meshes(ranks, found) for draft in _on_mesh(found, rows, *mesh)]
    return list(dict.fromkeys(drafts))


def _meshes(ranks: int, found: ProfileLike) -> Iterator[tuple[int, int, int]]:
    for stage, split in itertools.product(range(1, ranks + 1), repeat=2):
        if ranks % (stage * split) == 0 and split <= found.splits and stage <= len(found.names):
            yield ranks // (stage * split), stage, split


def _on_mesh(found: ProfileLike, rows: int, replicate: int, stage: int, split: int) -> Iterator[Draft]:
    plain = Draft(batch=rows, replicate=replicate, split=split)
    if stage == 1:
        yield plain
        yield plain.replaced(micro_batches=2)
        yield from (plain.replaced(shard=level) for level in (1, 2, 3) if replicate > 1)
        return
    for name in get_args(ScheduleName):
        chunks = 2 if name == "interleaved" else 1
        cuts = _cuts(found, rows, stage * chunks)
        counts = [count for count in (2, 4, 8) if count <= rows // replicate]
        for at, micros in itertools.product(cuts if name == "1f1b" else cuts[:1], counts):
            yield plain.replaced(stage=stage, chunks=chunks, cuts=at, schedule=name, micro_batches=micros)


def _cuts(found: ProfileLike, rows: int, stages: int) -> list[tuple[int, ...]]:
    """By arithmetic; of two stages also with one unit more or less in the first. None where units are too few."""
    units = found.sheet(max(1, rows // 4)).units
    costs = sums([unit.forward.flops + unit.backward.flops + unit.forward.bytes / 10 for unit in units])
    best = cut([costs] * stages) if len(units) >= stages else None
    if best is None:
        return []
    beside = [(best[0] + by,) for by in (-1, 1) if len(best) == 1 and 0 < best[0] + by < len(units)]
    return [best, *beside]
