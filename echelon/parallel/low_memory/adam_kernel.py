# mypy: ignore-errors
"""One step of low_memory Adam as one Triton kernel: the same numbers as ``formats.update``, in one pass over memory.

Multiplications and additions are not fused, and roots and quotients are rounded exactly, so that codes and weights are
bitwise equal to those of plain torch. The functions are in Triton's language, so no types are checked here.
"""

import torch
import triton
import triton.language as tl

from echelon.parallel.low_memory.formats import (
    BLOCK,
    FIRST_LEVELS,
    SECOND_LEVELS,
    SMALLEST_SCALE,
    AdamStepScalars,
    LowMemoryState,
)

ROWS, WARPS = 1, 2  # blocks and warps per program: the fastest of seven configurations on an H200, 137 entries/ns


@triton.jit
def _first_level(code, FIRST: tl.constexpr):
    return code * code * (1.0 / (FIRST * FIRST))


@triton.jit
def _second_level(code, SECOND: tl.constexpr):
    square = code * code
    return square * square * (1.0 / (SECOND * SECOND * SECOND * SECOND))


@triton.jit
def _chance(number):
    number = (number ^ (number >> 16)) * 0x85EBCA6B
    number = (number ^ (number >> 13)) * 0xC2B2AE35
    return number ^ (number >> 16)


@triton.jit
def _one_over(scale, SMALLEST: tl.constexpr):
    return tl.where(scale > SMALLEST, tl.div_rn(1.0, scale), 0.0)


@triton.jit(do_not_specialize=["count", "seed"])
def _step(
    weight_at, remainder_at, grad_at, first_at, second_at, first_scale_at, second_scale_at, count, seed,
    beta1, beta2, rest1, rest2, eps, shrink, decay, stride, inverse,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here, rows = at < count, row * BLOCK < count
    upper = tl.load(weight_at + at, mask=here, other=0).to(tl.int32)
    exact = ((upper << 16) + tl.load(remainder_at + at, mask=here, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    grad = tl.load(grad_at + at, mask=here, other=0.0).to(tl.float32) + exact * decay
    first = tl.load(first_at + at, mask=here, other=0).to(tl.float32)
    second = tl.load(second_at + at, mask=here, other=0).to(tl.float32)
    first_scale = tl.load(first_scale_at + row, mask=rows, other=0.0)
    second_scale = tl.load(second_scale_at + row, mask=rows, other=0.0)
    first = _first_level(first, FIRST) * tl.where(first < 0, -1.0, 1.0) * first_scale[:, None]
    second = _second_level(second, SECOND) * second_scale[:, None]

    first = first * beta1 + grad * rest1
    second = second * beta2 + grad * grad * rest2
    exact = exact * shrink - tl.div_rn(first, tl.sqrt_rn(second) * inverse + eps) * stride
    bits = tl.where(exact == exact, exact.to(tl.int32, bitcast=True), 0x7FC00000)  # noqa: PLR0124 - one NaN pattern
    upper = (bits + 0x8000) >> 16
    tl.store(weight_at + at, upper.to(tl.int16), mask=here)
    tl.store(remainder_at + at, (bits - (upper << 16)).to(tl.int16), mask=here)

    chance = _chance(at.to(tl.uint32) + seed.to(tl.uint32))
    first_scale = tl.max(tl.where(here, tl.abs(first), 0.0), 1)
    share = tl.abs(first) * _one_over(first_scale, SMALLEST)[:, None]
    lower = tl.minimum(tl.floor(tl.sqrt_rn(share) * FIRST), FIRST - 1.0)
    low, high = _first_level(lower, FIRST), _first_level(lower + 1.0, FIRST)
    up = (chance >> 16).to(tl.float32) * (1.0 / 65536) * (high - low) < share - low
    code = tl.where(up, lower + 1.0, lower)
    tl.store(first_at + at, tl.where(first < 0, -code, code).to(tl.int8), mask=here)
    tl.store(first_scale_at + row, first_scale, mask=rows)

    second_scale = tl.max(tl.where(here, second, 0.0), 1)
    share = second * _one_over(second_scale, SMALLEST)[:, None]
    lower = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(share)) * SECOND), SECOND - 1.0)
    low, high = _second_level(lower, SECOND), _second_level(lower + 1.0, SECOND)
    up = (chance & 0xFFFF).to(tl.float32) * (1.0 / 65536) * (high - low) < share - low
    code = tl.where(up, lower + 1.0, lower)
    code = tl.where(second > 0, tl.maximum(code, 1.0), 0.0)
    tl.store(second_at + at, code.to(tl.uint8), mask=here)
    tl.store(second_scale_at + row, second_scale, mask=rows)


def update(weight: torch.Tensor, grad: torch.Tensor, state: LowMemoryState, rule: AdamStepScalars, seed: int) -> None:
    """Apply one step to a range of entries, in place, on the current stream. All tensors are flat."""
    programs = -(-weight.numel() // (ROWS * BLOCK))
    with torch.cuda.device(weight.device):
        _step[(programs,)](
            weight.view(torch.int16), state.remainder, grad, state.first, state.second,
            state.first_scale, state.second_scale, weight.numel(), seed,
            *rule.betas, *rule.rests, rule.eps, rule.shrink, rule.decay, rule.stride, rule.inverse,
            BLOCK=BLOCK, ROWS=ROWS, FIRST=FIRST_LEVELS, SECOND=SECOND_LEVELS, SMALLEST=SMALLEST_SCALE,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
