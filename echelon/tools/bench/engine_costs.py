"""Measure the host costs of training beside kernels: per step, micro-batch, pipeline action, and gathered unit.

Two ranks train, with several plans, a model so small that hardly anything else takes time. The differences between the
plans give the cost of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from echelon.distributed.world import World
from echelon.tools.bench.device_timer import Row

WIDTH, UNITS, ROWS = 16, 8, 32
MANY = 9  # micro-batches: the cost of a single one is too small to measure
STEPS = 100


def engine_rows(world: World, quick: bool) -> list[Row]:
    """Return one row per plan. Every rank calls this.

    kernels:   kernels of one micro-batch through the whole model
    units:     units that have parameters
    messages:  collectives inside split layers
    seconds:   seconds of a step
    """
    from echelon.plan.draft import Draft
    from echelon.planner.profiling.profile import profile

    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    result = profile(_tiny(), batch, loss=mse_loss)
    kernels = sum(unit.forward.launches + unit.backward.launches for unit in result.sheet(4).units)
    replicas = Draft(batch=ROWS, replicate=world.size)
    staged = Draft(batch=ROWS, stage=world.size, cuts=_even_cuts(len(result.names), world.size), schedule="gpipe")
    ways = {
        "step": replicas,
        "micros": replicas.replaced(micro_batches=MANY),
        "gathers": replicas.replaced(shard=3),
        "few actions": staged.replaced(micro_batches=2),
        "actions": staged.replaced(micro_batches=2 + MANY),
        "deferred": staged.replaced(micro_batches=2 + MANY, schedule="zero-bubble"),
    }
    if result.splits >= world.size:
        ways["split"] = Draft(batch=ROWS, split=world.size)
    steps = STEPS // 4 if quick else STEPS
    units = sum(unit.weights > 0 for unit in result.sheet(4).units)
    counts = {"kernels": kernels, "units": units, "messages": _messages(result, world.size)}
    return [
        {"what": what, **counts, "seconds": _seconds(world, result, draft, batch, steps)}
        for what, draft in ways.items()
    ]


def _messages(found: Any, ranks: int) -> int:
    """Return the number of collectives inside layers that are split over ``ranks``; 0 if they cannot be."""
    if found.splits < ranks:
        return 0
    units = found.sheet(ROWS, ranks).units
    return sum(message.count for unit in units for way in (unit.forward, unit.backward) for message in way.messages)


def engine_figures(rows: Sequence[Row], launch: float, message: float = 0.0) -> dict[str, float]:
    """Return the host seconds by kind of cost, from the rows of ``engine_rows``.

    launch:   seconds per kernel, subtracted because the cost model counts them separately
    message:  seconds of the shortest collective, subtracted for the same reason
    """
    seconds = {row["what"]: row["seconds"] for row in rows}
    kernels, units = rows[0]["kernels"] * launch, rows[0]["units"]
    each_micro = (seconds["micros"] - seconds["step"]) / (MANY - 1)
    each_round = (seconds["actions"] - seconds["few actions"]) / MANY  # forward and backward of half of the model
    result = {
        "step": seconds["step"] - kernels - max(0.0, each_micro - kernels),
        "micro": each_micro - kernels,
        "action": (each_round - kernels / 2) / 2,
        "deferred": (seconds["deferred"] - seconds["actions"]) / (2 + MANY) / (rows[0]["kernels"] / 2),
        "unit": (seconds["gathers"] - seconds["step"]) / units / 2,  # each unit is gathered in forward and in backward
    }
    if "split" in seconds and rows[0]["messages"]:
        result["split"] = (seconds["split"] - seconds["step"]) / rows[0]["messages"] - message
    return {what: max(0.0, figure) for what, figure in result.items()}


def _tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


def _even_cuts(units: int, stages: int) -> tuple[int, ...]:
    return tuple(units * stage // stages for stage in range(1, stages))


def _seconds(world: World, found: Any, draft: Any, batch: tuple[torch.Tensor, ...], steps: int) -> float:
    import echelon
    from echelon.planner.apply.save_plan import make_saved_plan

    model = _tiny()
    saved = make_saved_plan(draft, found, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    quiet = echelon.Log(console=False)
    engine = echelon.distribute(model, loss=mse_loss, optimizer=optimizer, plan=saved, log=quiet)
    rows = tuple(tensor[: ROWS // draft.replicate] for tensor in batch)
    try:
        return _low(world, lambda: engine.step(*rows), steps)
    finally:
        engine.close()


def _low(world: World, step: Callable[[], object], steps: int) -> float:
    """Return the first decile of the seconds of a step, to exclude the load of other processes."""
    seconds = []
    for _ in range(steps):
        dist.barrier(world.control)
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.quantiles(seconds[2:], n=10)[0]
