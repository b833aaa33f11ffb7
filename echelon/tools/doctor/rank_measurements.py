"""Measurements between ranks that have joined torch.distributed through ``echelon.init``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from echelon.distributed.world import init
from echelon.tools.doctor.bounded_check import Facts
from echelon.tools.doctor.pairs import all_together, pair_rows, steps, sums_right

#: Seconds for all pairs of ranks.
PAIRS = 90.0


def talk(ranks_of: Mapping[int, Sequence[int]], seconds: float, quick: bool) -> Facts:
    """Join torch.distributed, check an all-reduce, and measure latencies and bandwidths between ranks.

    ranks_of: ranks of each host
    seconds:  limit for every wait for another rank
    quick:    True to check the all-reduce only
    """
    # NCCL's watchdog would end this process, and the report with it, when a collective takes too long
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    world = init(timeout=seconds)
    found: Facts = {"backend": world.backend, "right": sums_right(world)}
    if quick:
        return found
    found |= all_together(world)
    plan = steps(ranks_of)
    return found | {"pairs": pair_rows(world, plan, PAIRS), "planned": sum(map(len, plan))}
