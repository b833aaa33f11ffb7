"""Measurements between ranks that have joined torch.distributed through ``echelon.init``.

Latency and bandwidth of pairs of ranks on different hosts, of one pair within each host, and of all ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from echelon.distributed.world import World, init
from echelon.tools.doctor.host_details import Details

Pair = tuple[int, int]
#: With more steps than this, only ranks with the same index on their hosts are paired.
MOST_STEPS = 512
_SMALL, _PINGS, _LARGE_PINGS = 8, 20, 3
_LARGE = {"gloo": 2**22, "nccl": 2**26}
#: Seconds for all pairs of ranks.
PAIRS = 90.0


def talk(ranks_of: Mapping[int, Sequence[int]], seconds: float, quick: bool) -> Details:
    """Join torch.distributed, check an all-reduce, and measure latencies and bandwidths between ranks.

    ranks_of: ranks of each host
    seconds:  limit for every wait for another rank
    quick:    True to check the all-reduce only
    """
    # NCCL's watchdog would end this process, and the report with it, when a collective takes too long
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    world = init(timeout=seconds)
    result: Details = {"backend": world.backend, "right": sums_right(world)}
    if quick:
        return result
    result |= all_together(world)
    plan = steps(ranks_of)
    return result | {"pairs": pair_rows(world, plan, PAIRS), "planned": sum(map(len, plan))}


def host_rounds(hosts: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of host pairs: every two hosts are paired once, and each host is in at most one pair per round.

    This is the circle method of round-robin tournaments.
    """
    circle: list[int | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        couples = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


def steps(ranks_of: Mapping[int, Sequence[int]]) -> list[list[Pair]]:
    """Return steps of rank pairs to measure concurrently. Pairs of a step share no host, hence no bandwidth."""
    within = [(ranks[0], ranks[1]) for ranks in ranks_of.values() if len(ranks) > 1]
    result = [within] if within else []
    every = _is_few(ranks_of)
    for round_ in host_rounds(list(ranks_of)):
        columns = [_between(ranks_of[a], ranks_of[b], every) for a, b in round_]
        for step in range(max((len(column) for column in columns), default=0)):
            result.append([column[step] for column in columns if step < len(column)])
    return result


def _is_few(ranks_of: Mapping[int, Sequence[int]]) -> bool:
    largest = max(len(ranks) for ranks in ranks_of.values())
    return largest**2 * (len(ranks_of) - 1) <= MOST_STEPS


def _between(some: Sequence[int], others: Sequence[int], every: bool) -> list[Pair]:
    if every:
        return [(a, b) for a in some for b in others]
    return list(zip(some, others, strict=False))


def pair_rows(world: World, plan: Sequence[Sequence[Pair]], seconds: float) -> list[Details]:
    """Measure the pairs of all steps and return the rows of pairs whose first rank is this rank.

    All ranks stop together after ``seconds``.
    """
    rows, deadline = [], time.monotonic() + seconds
    for step in plan:
        goes_on = torch.tensor([int(time.monotonic() < deadline)])
        dist.all_reduce(goes_on, dist.ReduceOp.MIN, group=world.control)
        if not goes_on:
            break
        for pair in step:
            if world.rank in pair:
                row = _measure(world, pair)
                rows += [row] if world.rank == pair[0] else []
    return rows


def _measure(world: World, pair: Pair) -> Details:
    latency = _one_way(world, pair, _SMALL, _PINGS)
    large = _LARGE[world.backend]
    return {"ranks": list(pair), "latency": latency, "bandwidth": large / _one_way(world, pair, large, _LARGE_PINGS)}


def _one_way(world: World, pair: Pair, size: int, times: int) -> float:
    """Return the seconds of one message: half of a round trip."""
    first = world.rank == pair[0]
    other = pair[1] if first else pair[0]
    buffer = torch.zeros(size, dtype=torch.uint8, device=world.device if world.backend == "nccl" else "cpu")

    def there_and_back() -> None:
        for sends in (first, not first):
            dist.send(buffer, other) if sends else dist.recv(buffer, other)

    return _undisturbed(_timed(world, there_and_back, times)) / 2


def all_together(world: World) -> Details:
    """Measure the latency of a small all-reduce, and the bus bandwidth (as in nccl-tests) of a large one."""
    on = world.device if world.backend == "nccl" else torch.device("cpu")
    small, large = torch.zeros(2, device=on), torch.zeros(_LARGE[world.backend] // 4, device=on)
    latency = _undisturbed(_timed(world, lambda: dist.all_reduce(small), _PINGS))
    seconds = _undisturbed(_timed(world, lambda: dist.all_reduce(large), _LARGE_PINGS))
    carried = large.numel() * 4 * 2 * (world.size - 1) / world.size
    return {"backend": world.backend, "latency": latency, "bandwidth": carried / seconds}


def sums_right(world: World) -> bool:
    """Return True if an all-reduce over all ranks gives the right sum."""
    own = torch.tensor([float(world.rank + 1)], device=world.device)
    dist.all_reduce(own)
    return int(own.item()) == world.size * (world.size + 1) // 2


def _undisturbed(times: Sequence[float]) -> float:
    """Return the lower quartile, or the minimum of up to 3 times, to exclude disturbance by other processes."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 3 else min(times)


def _timed(world: World, doing: Callable[[], object], times: int) -> list[float]:
    doing()
    result = []
    for _ in range(times):
        start = time.perf_counter()
        doing()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        result.append(time.perf_counter() - start)
    return result
