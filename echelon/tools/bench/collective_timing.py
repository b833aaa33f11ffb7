"""Time collectives as training uses them, by size and number of ranks: all-reduce, all-gather, reduce-scatter, p2p."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from echelon.distributed.collectives import all_gather
from echelon.distributed.world import World
from echelon.parallel.zero.zero_collectives import ShardCollectives
from echelon.tools.bench.device_timer import Row

Doing = Callable[[], object]
_SMALL = 2**16


def group_sizes(world: World) -> list[int]:
    """Return the numbers of ranks to measure: 2, 4, 8 ... and all."""
    powers = [2**power for power in range(1, 20) if 2**power <= world.size]
    return sorted({*powers, world.size} - {1})


def collective_rows(world: World, quick: bool) -> list[Row]:
    """Return the timings of all groups that this rank is in; ranks 0 and 1 are in all of them.

    Ranks outside a group wait for it, so that they do not disturb its timing.
    """
    rows: list[Row] = []
    for ranks in group_sizes(world):
        group = dist.new_group(list(range(ranks)))
        if world.rank < ranks:
            assert group is not None
            rows += _of_group(world, group, ranks, quick)
        dist.barrier(world.control)
    return rows


def _of_group(world: World, group: dist.ProcessGroup, ranks: int, quick: bool) -> list[Row]:
    largest = 2**22 if quick else 2**26 if world.backend == "gloo" else 2**28
    sizes = [2**power for power in range(10, 29, 4 if quick else 2) if 2**power <= largest]
    rows: list[Row] = []
    for size in sizes:
        for kind, doing in _doings(world, group, size).items():
            seconds = _timed(world, doing, group, quick) / (2 if kind == "p2p" else 1)
            rows.append({"kind": kind, "ranks": ranks, "bytes": float(size), "seconds": seconds})
    return rows


def _doings(world: World, group: dist.ProcessGroup, size: int) -> dict[str, Doing]:
    """Return the calls to time, by kind. ``size``: bytes of the whole tensor that is reduced or gathered."""
    ranks, device = dist.get_world_size(group), world.device
    whole = torch.zeros(size // 4, device=device)
    matrix = torch.zeros(ranks, max(1, size // 4 // ranks), device=device)
    exchange = ShardCollectives(group, device)
    doings: dict[str, Doing] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: exchange.gather_lines(matrix[0], 1)(),  # noqa: PLW0108 - each call starts a new one
        "reduce_scatter": lambda: exchange.sum_lines(matrix, 2)(),  # noqa: PLW0108
    }
    if size <= _SMALL:
        doings["gather_small"] = lambda: all_gather(matrix[0], group)
    if ranks == 2:
        doings["p2p"] = _ping(world, size)
    return doings


def _ping(world: World, size: int) -> Doing:
    """Return a call that sends a message from rank 0 to rank 1 and back, which takes twice the time of one message.

    With gloo, GPU tensors are staged through host memory, as in a pipeline (parallel/pipeline/transport.py).
    """
    staged = world.backend == "gloo" and world.device.type == "cuda"
    buffer = torch.zeros(size, dtype=torch.uint8, device="cpu" if staged else world.device)
    there = torch.zeros(size, dtype=torch.uint8, device=world.device) if staged else buffer

    def send(to: int) -> None:
        if staged:
            buffer.copy_(there)
        dist.send(buffer, to)

    def receive(source: int) -> None:
        dist.recv(buffer, source)
        if staged:
            there.copy_(buffer)

    first, second = (send, receive) if world.rank == 0 else (receive, send)
    return lambda: (first(1 - world.rank), second(1 - world.rank))


def _timed(world: World, doing: Doing, group: dist.ProcessGroup, quick: bool) -> float:
    """Return the seconds of one call. All ranks repeat it equally often; rank 0 decides how often.

    The result is the lower quartile, to exclude the load of other processes on the machine.
    """
    call_seconds(world, doing)
    times = torch.tensor(
        [max(3, min(50, int((0.05 if quick else 0.2) / call_seconds(world, doing))))], device=world.device
    )
    dist.broadcast(times, 0, group=group)
    return statistics.quantiles((call_seconds(world, doing) for _ in range(int(times))), n=4)[0]


def call_seconds(world: World, doing: Doing) -> float:
    """Return the seconds of one call, with those of the kernels that it has launched."""
    start = time.perf_counter()
    doing()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - start
