"""The runtime's own split applied to a fake model, as one rank of a process group whose collectives do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from echelon.plan.fake_forward import placeholder_mode
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.strategy.annotations.marks import Split, within


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[dist.ProcessGroup]:
    """Yield a process group whose collectives do nothing but are seen by ``OpTracer``.

    Within the context, the group is registered with torch as an NCCL group.
    """
    group = dist.ProcessGroup(0, ranks)  # type: ignore[call-arg]
    known = dist.distributed_c10d._world
    known.pg_map[group] = ("nccl", None)  # type: ignore[assignment]
    known.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}  # torch looks up the members inside a job
    try:
        yield group
    finally:
        del known.pg_map[group], known.pg_group_ranks[group]


def split_first(
    shadow: FakeModel, marks: Mapping[str, Split], group: dist.ProcessGroup, spread: bool = False, rank: int = 0
) -> None:
    """Split the fake model as rank ``rank`` of ``group`` would. Of equal units, only the first is split.

    spread: True if each rank of the split has a batch of its own; default False
    rank:   rank in the group; default 0
    """
    from echelon.parallel.tensor import SplitAxis, apply_split

    others = tuple(shadow.like)
    wanted = {name: mark for name, mark in marks.items() if not any(within(name, other) for other in others)}
    with placeholder_mode(), shadow.without_clones():
        apply_split(shadow.model, wanted, SplitAxis(group, rank, group.size(), spread))
