"""Measure matrix products, convolutions and attention by size and dtype, in shapes that occur in models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention

from echelon.tools.bench.device_timer import Call, DeviceTimer, Row

Shape = tuple[int, ...]

#: (batch, m, n, k). Squares, then shapes of transformers: tokens x width, logits of the head, gradient of a weight.
_GPU_SQUARES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_GPU_SKINNY: tuple[Shape, ...] = (
    *((1, 512, 768, 768), (1, 2048, 1024, 1024), (1, 4096, 3072, 768), (1, 8192, 1024, 4096), (1, 8192, 4096, 1024)),
    *((1, 16384, 4096, 1024), (1, 1024, 4096, 8192), (1, 4096, 32768, 1024), (1, 16384, 8192, 8192)),
    *((96, 512, 512, 64), (256, 1024, 1024, 64)),
)
_CPU_SQUARES = (16, 32, 64, 128, 256, 512, 1024)
_CPU_SKINNY: tuple[Shape, ...] = (
    *((1, 64, 128, 512), (1, 32, 256, 256), (1, 256, 768, 768), (1, 512, 2048, 512), (1, 512, 512, 2048)),
    *((1, 128, 64, 64), (16, 64, 64, 32), (1, 2048, 512, 512)),
)
#: from thin to thick, with all other dimensions equal: a linear layer on few rows
_THIN: tuple[Shape, ...] = tuple((1, rows, 512, 256) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256))

#: (samples, channels in, height = width, channels out, size of the filter), as in residual networks
_CONVOLUTIONS: tuple[Shape, ...] = (
    *((1, 64, 28, 64, 3), (8, 64, 56, 64, 3), (8, 256, 14, 256, 3), (64, 64, 56, 64, 3), (64, 128, 28, 128, 3)),
    *(
        (64, 256, 14, 256, 3),
        (64, 512, 7, 512, 3),
        (64, 256, 56, 64, 1),
        (64, 1024, 14, 256, 1),
        (256, 128, 28, 128, 3),
        (64, 64, 56, 256, 1),
        (64, 512, 28, 128, 1),
        (64, 2048, 7, 512, 1),
        (256, 256, 56, 64, 1),
        (64, 3, 224, 64, 7),
    ),
)
#: the same with a filter of its own for each channel, as in mobile networks and ConvNeXt
_DEPTHWISE: tuple[Shape, ...] = (
    (64, 96, 56, 96, 7),
    (64, 384, 14, 384, 7),
    (64, 192, 28, 192, 3),
    (8, 192, 28, 192, 3),
)
_CPU_CONVOLUTIONS: tuple[Shape, ...] = (
    *((1, 8, 16, 16, 3), (4, 16, 16, 16, 3), (8, 32, 16, 32, 3), (8, 64, 16, 64, 3), (16, 64, 28, 64, 3)),
)

#: (samples, heads, positions, width of a head)
_ATTENTION: tuple[Shape, ...] = (
    *((256, 16, 128, 64), (32, 16, 512, 64), (8, 16, 1024, 64), (8, 16, 2048, 64)),
    *((4, 16, 2048, 128), (2, 16, 4096, 128)),
)
_CPU_ATTENTION: tuple[Shape, ...] = ((4, 4, 64, 32), (2, 8, 128, 64), (1, 8, 256, 64))

_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtypes_of(clock: DeviceTimer) -> tuple[str, ...]:
    """Return the dtypes worth measuring. CPUs compute float16 in software, so it is not measured there."""
    if not clock.on_gpu:
        return ("float32", "bfloat16")
    capability = torch.cuda.get_device_capability(clock.device)
    return ("float32", "tf32", "float16", "bfloat16") if capability >= (8, 0) else ("float32", "float16")


def product_rows(clock: DeviceTimer, dtype: str, quick: bool) -> list[Row]:
    squares, skinny = (_GPU_SQUARES, _GPU_SKINNY) if clock.on_gpu else (_CPU_SQUARES, _CPU_SKINNY)
    shapes = [(1, n, n, n) for n in (squares[:-2] if quick else squares)] + list(skinny[:4] if quick else skinny)
    if dtype != "float32" and not clock.on_gpu:
        shapes = shapes[2:-1:2]
    return [product_row(clock, dtype, shape) for shape in shapes]


def thin_rows(clock: DeviceTimer, quick: bool) -> list[Row]:
    return [product_row(clock, "float32", shape) for shape in (_THIN[::3] if quick else _THIN)]


def product_row(clock: DeviceTimer, dtype: str, shape: Shape) -> Row:
    batch, m, n, k = shape

    def make() -> Call:
        left = torch.randn(batch, m, k, device=clock.device, dtype=_DTYPES[dtype])
        right = torch.randn(batch, k, n, device=clock.device, dtype=_DTYPES[dtype])
        if batch == 1:
            left, right = left[0], right[0]
        return lambda: left @ right

    with _precision(dtype):
        seconds = clock.seconds_of(make, 4 * batch * (m * k + k * n + m * n))
    return {"dtype": dtype, "shape": list(shape), "flops": 2.0 * batch * m * n * k, "seconds": seconds}


def convolution_rows(clock: DeviceTimer, dtype: str, quick: bool) -> list[Row]:
    """Time forward and backward together. ``flops`` and ``seconds`` are for the forward's share, a third of the total.

    For a convolution whose input needs no gradient the share is a half. On a GPU, channels come last, as in a run.
    """
    shapes = _CONVOLUTIONS if clock.on_gpu else _CPU_CONVOLUTIONS
    rows = [_convolution(clock, dtype, shape) for shape in (shapes[1::2] if quick else shapes)]
    apart = (_DEPTHWISE[:1] if quick else _DEPTHWISE) if clock.on_gpu else ()
    return rows + [_convolution(clock, dtype, shape, groups=shape[1]) for shape in apart]


def _convolution(clock: DeviceTimer, dtype: str, shape: Shape, groups: int = 1) -> Row:
    samples, channels, side, out, size = shape
    layout = torch.channels_last if clock.on_gpu else torch.contiguous_format
    learns = channels > 3  # images have no gradient

    def filled(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=clock.device, dtype=_DTYPES[dtype]).to(memory_format=layout)

    x = filled(samples, channels, side, side).requires_grad_(learns)
    w = filled(out, channels // groups, size, size).requires_grad_()
    stride = 2 if size > 3 and groups == 1 else 1

    def forward() -> Tensor:
        return conv2d(x, w, None, stride, size // 2, groups=groups)

    y = forward()
    inputs = (x, w) if learns else (w,)
    flops = 2.0 * y.numel() * channels // groups * size * size
    seconds = clock.seconds(lambda: _there_and_back(forward(), inputs, y.detach()))
    row = {"dtype": dtype, "shape": list(shape), "flops": flops, "seconds": seconds / (1 + len(inputs))}
    return row | ({"groups": groups} if groups > 1 else {})


def attention_rows(clock: DeviceTimer, dtype: str, quick: bool) -> list[Row]:
    """Time forward and backward together. ``flops`` and ``seconds`` are for the forward's share.

    Backward has 2.5 times the FLOPs of forward.
    """
    shapes = _ATTENTION if clock.on_gpu else _CPU_ATTENTION
    ways = (False, True) if clock.on_gpu else (False,)
    return [_attention(clock, dtype, shape, way) for shape in (shapes[:2] if quick else shapes) for way in ways]


def _attention(clock: DeviceTimer, dtype: str, shape: Shape, causal: bool) -> Row:
    samples, heads, positions, width = shape

    def make() -> Call:
        q, k, v = (torch.randn(shape, device=clock.device, dtype=_DTYPES[dtype], requires_grad=True) for _ in range(3))
        back = torch.randn(shape, device=clock.device, dtype=_DTYPES[dtype])
        return lambda: _there_and_back(scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), back)

    flops = 4.0 * samples * heads * positions**2 * width
    seconds = clock.seconds_of(make, 32 * samples * heads * positions * width)
    return {"dtype": dtype, "shape": list(shape), "flops": flops, "seconds": seconds / 3.5, "causal": causal}


def _there_and_back(y: Tensor, inputs: tuple[Tensor, ...], back: Tensor) -> None:
    torch.autograd.grad(y, inputs, back)


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
