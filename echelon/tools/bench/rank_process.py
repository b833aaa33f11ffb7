"""One rank of a measurement: ``python -m echelon.tools.bench.rank_process RESULT [--quick] [--engine]``.

ranks.py starts it. All ranks that have a GPU or a core of their own measure it at the same time, because in training
all devices work at the same time and share memory bandwidth and cooling. If there are more ranks than devices, the
others wait, and take part only in the measurement of collectives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.distributed.world import World, init, shutdown
from echelon.planner.cluster.detect import cores
from echelon.tools.bench.collective_timing import collective_rows
from echelon.tools.bench.compute_kernels import (
    attention_rows,
    convolution_rows,
    dtypes_of,
    product_row,
    product_rows,
    thin_rows,
)
from echelon.tools.bench.device_timer import DeviceTimer, Row
from echelon.tools.bench.engine_costs import engine_rows
from echelon.tools.bench.kernel_kinds import heavy_rows, kind_rows
from echelon.tools.bench.launch_overhead import launch_rows, training_rows
from echelon.tools.bench.memory_bandwidth import function_rows, stream_row, stream_rows, update_rows
from echelon.tools.bench.overlap import overlap_rows

Rows = dict[str, list[Row]]
Part = tuple[str, Callable[[], list[Row]]]


def main() -> None:
    result, quick = sys.argv[1], "--quick" in sys.argv[2:]
    world = init()
    if world.device.type == "cpu":
        torch.set_num_threads(1)
    rows = {"engine": engine_rows(world, quick)} if "--engine" in sys.argv[2:] else measure(world, quick)
    if world.rank == 0:
        Path(result).write_text(json.dumps(rows), encoding="utf-8")
    shutdown()


def measure(world: World, quick: bool) -> Rows:
    rows: Rows = {}
    start = time.monotonic()
    at_work = world.rank < devices_here(world)
    for name, part in _device_parts(world, quick):
        _together(world)
        if at_work:
            rows[name] = part()
        _report(world, f"{name}: {_words(rows.get(name, []))}", start)
    for name, part in _link_parts(world, quick) if world.size > 1 else []:
        _together(world)
        rows[name] = part()
        _report(world, f"{name} among up to {world.size} ranks ({world.backend})", start)
    return rows


def devices_here(world: World) -> int:
    """Return the number of ranks that have a GPU or a core of their own; more ranks would only slow these down."""
    return torch.cuda.device_count() if world.device.type == "cuda" else cores()


def _device_parts(world: World, quick: bool) -> list[Part]:
    clock = DeviceTimer(world.device, 0.01 if quick else 0.04 if world.device.type == "cuda" else 0.2)
    dtypes = dtypes_of(clock)
    half = dtypes[-1] if clock.on_gpu else "float32"
    both = dict.fromkeys(("float32", half))
    return [
        ("alone", lambda: alone_rows(world, clock)),
        *((f"products {dtype}", partial(product_rows, clock, dtype, quick)) for dtype in dtypes),
        *((f"convolutions {dtype}", partial(convolution_rows, clock, dtype, quick)) for dtype in both),
        *(
            (f"attention {dtype}", partial(attention_rows, clock, dtype, quick))
            for dtype in both
            if dtype == half or clock.on_gpu
        ),
        ("streams", lambda: stream_rows(clock, quick)),
        *(
            [("kinds", lambda: kind_rows(clock, half, quick)), ("functions", lambda: heavy_rows(clock, half))]
            if clock.on_gpu
            else [("thin", lambda: thin_rows(clock, quick)), ("functions", lambda: function_rows(clock))]
        ),
        ("update", lambda: update_rows(clock, quick)),
        ("launch", lambda: launch_rows(clock)),
        *([] if clock.on_gpu else [("training", lambda: training_rows(clock))]),
    ]


def alone_rows(world: World, clock: DeviceTimer) -> list[Row]:
    """Measure rank 0 while all other ranks are idle, to see how much the others slow it down."""
    if world.rank:
        return []
    shape, size = ((1, 4096, 4096, 4096), 2**28) if clock.on_gpu else ((1, 512, 512, 512), 2**24)
    return [product_row(clock, "float32", shape), stream_row(clock, size)]


def _link_parts(world: World, quick: bool) -> list[Part]:
    return [
        ("collectives", lambda: collective_rows(world, quick)),
        ("overlap", lambda: overlap_rows(world, quick)),
    ]


def _together(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if world.size > 1:
        dist.barrier(world.control)


def _words(rows: list[Row]) -> str:
    """Return the best of the measured rates as text for a progress line."""
    words = [f"{row['what']} {row['seconds'] * 1e6:.1f} us" for row in rows if "what" in row]
    for name, unit in (("flops", "GFLOP/s"), ("bytes", "GB/s")):
        rates = [row[name] / row["seconds"] / 1e9 for row in rows if name in row]
        words += [f"up to {max(rates):,.1f} {unit}"] if rates else []
    return ", ".join(words)


def _report(world: World, line: str, start: float) -> None:
    if world.rank == 0:
        print(f"echelon bench: {time.monotonic() - start:5.1f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
