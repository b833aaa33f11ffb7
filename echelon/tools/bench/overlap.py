"""Measure an all-reduce while ranks compute: how much of it is overlapped, and how much slower both become."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from echelon.distributed.world import World
from echelon.tools.bench.collective_timing import call_seconds
from echelon.tools.bench.device_timer import Row

_SMALL = 2**16  # elements of the all-reduce in the middle of computing
_TURN, _TURNS = 0.002, 10  # seconds of computing before each all-reduce, and number of all-reduces


def overlap_rows(world: World, quick: bool) -> list[Row]:
    """Return the seconds of computing alone, of an all-reduce alone, and of both at once, and the skew.

    The computation is sized to take about as long as the all-reduce. Every rank calls this.
    """
    on_gpu = world.device.type == "cuda"
    message = torch.zeros((2**20 if quick else 2**22) * (4 if world.backend == "nccl" else 1), device=world.device)
    side = 2048 if on_gpu else 256
    matrix = torch.randn(side, side, device=world.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def both(times: int) -> None:
        work = dist.all_reduce(message, async_op=True)
        compute(times)
        assert work is not None
        work.wait()

    summing = _middle(world, lambda: dist.all_reduce(message))
    times = _agreed(world, max(1, round(summing / _middle(world, lambda: compute(4)) * 4)))
    computing = _middle(world, lambda: compute(times))
    together = _middle(world, lambda: both(times))
    row = {"bytes": float(message.numel() * 4), "compute": computing, "sum": summing, "both": together}
    return [row | {"skew": _skew(world, compute)}]


def _skew(world: World, compute: Callable[[int], None]) -> float:
    """Return the extra seconds of an all-reduce in the middle of computing, compared with one by itself.

    The causes are that ranks wait for each other, and that the communication thread waits for a core.
    """
    small = torch.zeros(_SMALL, device=world.device)
    calls = _agreed(world, max(1, round(_TURN / _middle(world, lambda: compute(4)) * 4)))

    def by_turns(summing: bool) -> None:
        for _ in range(_TURNS):
            compute(calls)
            if summing:
                dist.all_reduce(small)

    alone = _middle(world, lambda: dist.all_reduce(small))
    return max(0.0, (_middle(world, lambda: by_turns(True)) - _middle(world, lambda: by_turns(False))) / _TURNS - alone)


def hidden_part(row: Row) -> float:
    """Return the overlapped fraction: 1 if both took no longer than the longer one, 0 if they took the sum of both."""
    shorter = min(row["compute"], row["sum"])
    return float(min(1.0, max(0.0, (row["compute"] + row["sum"] - row["both"]) / shorter)))


def _middle(world: World, doing: Callable[[], object]) -> float:
    def once() -> float:
        dist.barrier(world.control)
        return call_seconds(world, doing)

    once()
    return statistics.quantiles((once() for _ in range(15)), n=4)[0]


def _agreed(world: World, number: int) -> int:
    """Broadcast rank 0's number to all ranks."""
    agreed = torch.tensor([number])
    dist.broadcast(agreed, 0, group=world.control)
    return int(agreed)
