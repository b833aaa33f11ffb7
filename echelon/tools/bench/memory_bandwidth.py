"""Measure the memory bandwidth of a device: by size, and in an optimizer's update."""

from __future__ import annotations

import torch

from echelon.tools.bench.device_timer import Call, DeviceTimer, Row

#: Bytes per parameter. Adam reads a parameter, its gradient and two moments, and writes three of them, in float32.
ADAM_BYTES = 28
MOMENTUM_BYTES = 20
_ENTRIES = 2**17


def stream_rows(clock: DeviceTimer, quick: bool) -> list[Row]:
    """Time, by size, a sum of two tensors into newly allocated memory as in models; allocator time is included."""
    largest = 2**30 if clock.on_gpu else 2**27
    sizes = [2**power for power in range(12, 31, 4 if quick else 2) if 2**power <= largest]
    return [stream_row(clock, size) for size in sizes]


def stream_row(clock: DeviceTimer, size: int) -> Row:
    def make() -> Call:
        a, b = (torch.randn(size // 12, device=clock.device) for _ in range(2))
        return lambda: a + b

    return {"bytes": float(size // 12 * 12), "seconds": clock.seconds_of(make, size)}


def function_rows(clock: DeviceTimer) -> list[Row]:
    """Time a function (gelu) that takes a CPU many instructions per element."""

    def make() -> Call:
        x = torch.randn(_ENTRIES, device=clock.device)
        return lambda: torch.nn.functional.gelu(x)

    return [{"entries": _ENTRIES, "seconds": clock.seconds_of(make, 8 * _ENTRIES)}]


def update_rows(clock: DeviceTimer, quick: bool) -> list[Row]:
    """Time updates of optimizers; on a GPU, their fused steps, which a run switches on."""
    count = 2**26 if clock.on_gpu else 2**20 if quick else 2**22
    parameters = [torch.nn.Parameter(torch.randn(count // 16, device=clock.device)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    fused = True if clock.on_gpu else None
    adam = torch.optim.Adam(parameters, lr=1e-4, fused=fused)
    momentum = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=fused)
    return [
        {"parameters": count, "bytes": float(ADAM_BYTES * count), "seconds": clock.seconds(adam.step)},
        {
            "optimizer": "momentum",
            "bytes": float(MOMENTUM_BYTES * count),
            "seconds": clock.seconds(momentum.step),
        },
    ]
