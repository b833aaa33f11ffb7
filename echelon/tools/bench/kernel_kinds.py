"""Measure, by kind, kernels that reach less of a GPU's bandwidth than a plain sum.

They decide the speed of models that are not made of matrix products alone. Bytes are counted as in
planner/profiling/kernel_costs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, dropout, gelu, layer_norm

from echelon.tools.bench.device_timer import Call, DeviceTimer, Row

_ROWS, _WIDTH = 2**14, 2048

#: (samples, channels, height = width), as in residual networks; each channel is the work of one thread block
_NORMED = ((64, 64, 56), (64, 128, 28), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (64, 2048, 7))


def kind_rows(clock: DeviceTimer, half: str, quick: bool) -> list[Row]:
    """Return one row per kind of kernel, in float32 and ``half``; ``bytes`` are those of all its kernels together."""
    return [row for dtype in ("float32", half) for row in _of_dtype(clock, dtype, half, quick)]


def _of_dtype(clock: DeviceTimer, dtype: str, half: str, quick: bool) -> Iterator[Row]:
    for kind, (calls, size) in _calls(clock, getattr(torch, dtype), getattr(torch, half)).items():
        seconds = sum(clock.seconds(call) for call in calls)
        yield {"kind": kind, "dtype": dtype, "bytes": size, "kernels": len(calls), "seconds": seconds}
    for shape in _NORMED[::2] if quick else _NORMED:
        yield _batch_norm(clock, dtype, shape)


def _calls(clock: DeviceTimer, dtype: torch.dtype, half: torch.dtype) -> dict[str, tuple[list[Call], float]]:
    """Return, by kind, the calls to time and the bytes that they read and write in total."""
    x = torch.randn(_ROWS, _WIDTH, device=clock.device, dtype=dtype)
    other = x.to(half if dtype is torch.float32 else torch.float32)
    heads = x.view(16, -1, 4, _WIDTH // 256, 64)
    size, mixed = float(x.numel() * x.element_size()), float(x.numel() * other.element_size())
    adding: Call = lambda: x + other  # noqa: E731
    beside = (adding, 2 * size + mixed) if dtype is torch.float32 else (lambda: dropout(x, 0.1), 2 * size + x.numel())
    return {
        "layout": ([lambda: heads.permute(2, 0, 3, 1, 4).contiguous()], 2 * size),
        "copy": ([lambda: other.to(dtype)], size + mixed),
        "reduction": ([lambda: x.sum(0)], size),
        "pointwise": ([lambda: x + x, beside[0]], 2 * size + beside[1]),
        "normalization": ([_layer_norm(x)], 5 * size),
    }


def _layer_norm(x: Tensor) -> Call:
    given = x.detach().requires_grad_()
    weight, bias = (torch.ones(x.shape[1:], device=x.device, dtype=x.dtype, requires_grad=True) for _ in range(2))
    return lambda: torch.autograd.grad(layer_norm(given, x.shape[1:], weight, bias), (given, weight, bias), x)


def _batch_norm(clock: DeviceTimer, dtype: str, shape: tuple[int, int, int]) -> Row:
    samples, channels, side = shape
    size = (samples, channels, side, side)
    x = torch.randn(size, device=clock.device, dtype=getattr(torch, dtype), requires_grad=True)
    weight, bias = (torch.ones(channels, device=clock.device, requires_grad=True) for _ in range(2))
    mean, var = (torch.ones(channels, device=clock.device) for _ in range(2))
    back = torch.randn_like(x)
    seconds = clock.seconds(
        lambda: torch.autograd.grad(batch_norm(x, mean, var, weight, bias, True), (x, weight, bias), back)
    )
    moved = 5.0 * x.numel() * x.element_size()
    return {
        "kind": "batch_norm",
        "dtype": dtype,
        "channels": channels,
        "bytes": moved,
        "kernels": 2,
        "seconds": seconds,
    }


def heavy_rows(clock: DeviceTimer, half: str) -> list[Row]:
    """Time forward and backward of a function (gelu) that takes many instructions per element."""
    x = torch.randn(_ROWS, _WIDTH, device=clock.device, dtype=getattr(torch, half), requires_grad=True)
    seconds = clock.seconds(lambda: torch.autograd.grad(gelu(x), x, x.detach()))
    return [{"entries": 2 * x.numel(), "seconds": seconds}]
