"""Before step 0 every rank shows its Plan; ranks that were built differently are told where they part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.errors import DataError, MismatchError
from echelon.parallel.collective import gather_json
from echelon.plan import Plan
from echelon.plan.plan import first_difference


def agree(plan: Plan, group: dist.ProcessGroup) -> None:
    """Raise on every rank when one rank's plan differs from rank 0's, naming the first such rank and difference."""
    hashes = gather_json(plan.hash, group)
    strangers = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if not strangers:
        return
    plans = gather_json(json.loads(plan.to_json()), group)
    rank = strangers[0]
    where = first_difference(plans[rank], plans[0])
    raise MismatchError(
        f"rank {rank} was built differently from rank 0: {where}; "
        "every rank must build the same model, optimizer and strategy"
    )


def agree_on_batch(batch: Any, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
    """Raise when the ranks that work on one batch together were given different ones."""
    if group is None:
        return
    found = gather_json([_looks(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], group)
    members = sorted(ranks)
    strangers = [rank for rank, looks in zip(members, found, strict=True) if looks != found[0]]
    if strangers:
        together = ", ".join(map(str, members))
        raise DataError(
            f"rank {strangers[0]} was given another batch than rank {members[0]}, but ranks {together} work on one "
            "batch together; take batches from engine.loader(), of data that is the same on all of them"
        )


def _looks(leaf: Tensor) -> list[Any]:
    values = leaf.detach()
    total = float(values.double().sum()) if values.numel() and not values.is_complex() else 0.0
    return [list(leaf.shape), str(leaf.dtype), repr(total)]
