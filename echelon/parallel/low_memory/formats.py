"""Number formats of low_memory training: an fp32 weight as bf16 plus a remainder, moments in 8 bits.

A weight is stored as its bf16 rounding (halves away from zero) and the missing 16 bits, as a signed difference of the
bit patterns: both together give the fp32 weight exactly, so that small updates are not lost.

Moments are 8-bit codes in blocks of 256, with one fp32 scale per block, the largest magnitude in it. A code c stands
for +-(c / 127)^2 times the scale in the first moment, and for (c / 255)^4 in the second: steps are fine where most
values are, and the square root of the second moment has a range of 1 to 65,025. Rounding is stochastic, because an
average that moves by a thousandth per step would otherwise never leave its code. A nonzero second moment is never
rounded to zero, because the update, which is divided by its root, would explode. The random numbers are a hash of the
seed and the entry's position, the same on every device, rank and run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # entries that share a scale
FIRST_LEVELS = 127
SECOND_LEVELS = 255
SMALLEST_SCALE = 1e-37  # below it, the reciprocal of the scale would not be finite
WORD = 0xFFFFFFFF
AT_ONCE = 1 << 20  # entries processed at a time on a CPU, so that temporaries stay small


@dataclass(frozen=True)
class AdamStepScalars:
    """Scalars of one step of Adam or AdamW, which are the same for all entries.

    rests:   1 - beta, computed in fp64: 1 - 0.999 in fp32 is wrong in the fifth digit
    shrink:  factor of the weight by AdamW's decoupled weight decay
    decay:   Adam's weight decay: factor of the weight that is added to the gradient
    stride:  learning rate, divided by the bias correction of the first moment
    inverse: reciprocal of the root of the second moment's bias correction
    """

    betas: tuple[float, float]
    rests: tuple[float, float]
    eps: float
    shrink: float
    decay: float
    stride: float
    inverse: float


@dataclass(frozen=True)
class LowMemoryState:
    """Remainders and moments of a parameter, or of a range of its entries."""

    remainder: Tensor
    first: Tensor
    second: Tensor
    first_scale: Tensor
    second_scale: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.remainder, self.first, self.second, self.first_scale, self.second_scale


def split_fp32(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 weights into bf16 weights and remainders."""
    bits = torch.where(exact == exact, exact, torch.nan).view(torch.int32)  # noqa: PLR0124 - one pattern for all NaN
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_fp32(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 weights of bf16 weights and remainders: the inverse of ``split_fp32``."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def scramble(number: int) -> int:
    """Return a 32-bit hash (the finalizer of MurmurHash3)."""
    number &= WORD
    number = ((number ^ number >> 16) * 0x85EBCA6B) & WORD
    number = ((number ^ number >> 13) * 0xC2B2AE35) & WORD
    return number ^ number >> 16


def seed_of(piece: int, step: int) -> int:
    """Return the seed of one update of one piece: 31 bits, so that it fits a signed 32-bit integer in Triton."""
    return scramble(scramble(step) ^ (piece * 0x9E3779B1)) >> 1


def chances(seed: int, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two pseudo-random numbers in [0, 1) for each of ``count`` entries from ``start`` on."""
    number = (torch.arange(start, start + count, device=device) + seed) & WORD
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & WORD
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & WORD
    number = number ^ (number >> 16)
    return (number >> 16).float() / 65536, (number & 0xFFFF).float() / 65536


def first_level(code: Tensor) -> Tensor:
    return code * code * (1 / FIRST_LEVELS**2)


def second_level(code: Tensor) -> Tensor:
    square = code * code
    return square * square * (1 / SECOND_LEVELS**4)


def _root(values: Tensor) -> Tensor:
    """Return the correctly rounded fp32 root: torch's own on a CPU is off by one bit for a fifth of all values."""
    return values.double().sqrt().float()


def _share(values: Tensor, scale: Tensor) -> Tensor:
    return values * torch.where(scale > SMALLEST_SCALE, 1 / scale, 0.0)


def _coded_first(values: Tensor, scale: Tensor, chance: Tensor) -> Tensor:
    share = _share(values.abs(), scale)
    lower = (_root(share) * FIRST_LEVELS).floor().clamp(max=FIRST_LEVELS - 1)
    low, high = first_level(lower), first_level(lower + 1)
    code = lower + (chance * (high - low) < share - low)
    return torch.where(values < 0, -code, code).to(torch.int8)


def _coded_second(values: Tensor, scale: Tensor, chance: Tensor) -> Tensor:
    share = _share(values, scale)
    lower = (_root(_root(share)) * SECOND_LEVELS).floor().clamp(max=SECOND_LEVELS - 1)
    low, high = second_level(lower), second_level(lower + 1)
    code = lower + (chance * (high - low) < share - low)
    return torch.where(values > 0, code.clamp(min=1), 0).to(torch.uint8)


def update(weight: Tensor, grad: Tensor, state: LowMemoryState, rule: AdamStepScalars, seed: int) -> None:
    """Apply one step to a range of entries, in place, in plain torch: the same numbers as the Triton kernel.

    All tensors are flat.
    """
    for start in range(0, weight.numel(), AT_ONCE):
        end = min(start + AT_ONCE, weight.numel())
        blocks = slice(start // BLOCK, -(-end // BLOCK))
        part = LowMemoryState(
            remainder=state.remainder[start:end],
            first=state.first[start:end],
            second=state.second[start:end],
            first_scale=state.first_scale[blocks],
            second_scale=state.second_scale[blocks],
        )
        by_chance = chances(seed, start, end - start, weight.device)
        _update(weight[start:end], grad[start:end].float(), part, rule, by_chance)


def _update(
    weight: Tensor, grad: Tensor, state: LowMemoryState, rule: AdamStepScalars, chance: tuple[Tensor, Tensor]
) -> None:
    exact = join_fp32(weight, state.remainder)
    first, second = _blocks(state.first.float()), _blocks(state.second.float())
    first = first_level(first) * torch.where(first < 0, -1.0, 1.0) * state.first_scale[:, None]
    second = second_level(second) * state.second_scale[:, None]
    grad = _blocks(grad + exact * rule.decay)
    first = first * rule.betas[0] + grad * rule.rests[0]
    second = second * rule.betas[1] + grad * grad * rule.rests[1]
    change = first / (_root(second) * rule.inverse + rule.eps) * rule.stride
    upper, remainder = split_fp32(exact * rule.shrink - change.flatten()[: exact.numel()])
    weight.copy_(upper)
    state.remainder.copy_(remainder)
    state.first_scale.copy_(first.abs().amax(1))
    state.second_scale.copy_(second.amax(1))
    by_chance = [_blocks(each) for each in chance]
    codes = _coded_first(first, state.first_scale[:, None], by_chance[0])
    state.first.copy_(codes.flatten()[: exact.numel()])
    codes = _coded_second(second, state.second_scale[:, None], by_chance[1])
    state.second.copy_(codes.flatten()[: exact.numel()])


def _blocks(flat: Tensor) -> Tensor:
    """Return the entries as rows of one block each, the last one padded with zeros."""
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
