"""The runtime's own split on a model without contents, as the first of so many ranks, with nobody at the other end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from echelon.plan.fake_forward import placeholder_mode
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.strategy.annotations.marks import Split, within


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[dist.ProcessGroup]:
    """A group whose messages are seen by a ``Trace``, and go nowhere. Known to torch as one of GPUs while it lasts."""
    group = dist.ProcessGroup(0, ranks)  # type: ignore[call-arg]
    known = dist.distributed_c10d._world
    known.pg_map[group] = ("nccl", None)  # type: ignore[assignment]
    known.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}  # inside a job, its members are asked for
    try:
        yield group
    finally:
        del known.pg_map[group], known.pg_group_ranks[group]


def split_first(
    shadow: FakeModel, marks: Mapping[str, Split], group: dist.ProcessGroup, spread: bool = False, rank: int = 0
) -> None:
    """Cut the copy as the first rank of ``group`` would, or another. Of units that are alike, the first stands for all.

    spread: each has a batch of its own
    """
    from echelon.parallel.tensor import SplitAxis, apply_split

    others = tuple(shadow.like)
    wanted = {name: mark for name, mark in marks.items() if not any(within(name, other) for other in others)}
    with placeholder_mode(), shadow.without_clones():
        apply_split(shadow.model, wanted, SplitAxis(group, rank, group.size(), spread))
