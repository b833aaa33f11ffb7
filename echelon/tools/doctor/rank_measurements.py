"""The ranks join torch.distributed, as ``echelon.init`` has it, and measure one another."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from echelon.distributed.world import init
from echelon.tools.doctor.bounded_check import Facts
from echelon.tools.doctor.pairs import all_together, pair_rows, steps, sums_right

#: Seconds for all pairs of ranks.
PAIRS = 90.0


def talk(ranks_of: Mapping[int, Sequence[int]], seconds: float, quick: bool) -> Facts:
    """``ranks_of``: the ranks of each host. ``seconds``: for every wait for another rank."""
    # NCCL's watchdog would end this process, and the report with it, when a collective takes too long
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    world = init(timeout=seconds)
    found: Facts = {"backend": world.backend, "right": sums_right(world)}
    if quick:
        return found
    found |= all_together(world)
    plan = steps(ranks_of)
    return found | {"pairs": pair_rows(world, plan, PAIRS), "planned": sum(map(len, plan))}
