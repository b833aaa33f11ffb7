"""Facts about one rank: its device, its CPU affinity and its speed, measured as ``echelon bench`` does."""

from __future__ import annotations

import os

import torch

from echelon.base.environment import RankInfo
from echelon.distributed.device_choice import choose_device, count_gpus
from echelon.tools.bench.compute_kernels import product_row
from echelon.tools.bench.device_timer import DeviceTimer
from echelon.tools.bench.memory_bandwidth import stream_row
from echelon.tools.doctor.bounded_check import Facts

#: Side of the square matrices, and bytes read and written: large enough to fill the device, and still quick.
_GPU_SIDE, _CPU_SIDE, _GPU_STREAM, _CPU_STREAM = 8192, 512, 2**30, 2**26


def device_of(place: RankInfo) -> torch.device:
    """Return the device that ``echelon.init`` would choose."""
    return choose_device(place, None, count_gpus())


def describe(place: RankInfo) -> Facts:
    device = device_of(place)
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    found: Facts = {"device": "CPU", "threads": torch.get_num_threads(), "affinity": ranges(allowed)}
    if device.type != "cuda":
        return found
    free, total = torch.cuda.mem_get_info(device)
    facts = torch.cuda.get_device_properties(device)
    return found | {
        "device": facts.name,
        "index": device.index,
        "memory": total,
        "free_memory": free,
        "capability": f"{facts.major}.{facts.minor}",
    }


def ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges: ``0-3,8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def speeds(place: RankInfo) -> Facts:
    """Measure FLOP/s of a large matrix product and memory bytes/s, on all ranks at the same time, as in training."""
    device = device_of(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread, and CUDA events are recorded on it
    clock = DeviceTimer(device, 0.04 if device.type == "cuda" else 0.1)
    side = _GPU_SIDE if clock.on_gpu else _CPU_SIDE
    stream = stream_row(clock, _GPU_STREAM if clock.on_gpu else _CPU_STREAM)
    found: Facts = {"memory": stream["bytes"] / stream["seconds"]}
    for dtype in ("float32", "bfloat16"):
        row = product_row(clock, dtype, (1, side, side, side))
        found[dtype] = row["flops"] / row["seconds"]
    return found
