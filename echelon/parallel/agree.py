"""Before step 0 every rank shows its Plan; ranks that were built differently are told where they part."""

from __future__ import annotations

import json

import torch.distributed as dist

from echelon.errors import MismatchError
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
