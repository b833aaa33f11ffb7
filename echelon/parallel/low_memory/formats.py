"""The forms in which lean training keeps numbers: an fp32 weight as bf16 and a remainder, moments in 8 bits.

A weight is its bf16 rounding (halves away from zero) and the 16 bits that are missing, as a signed difference of the
bit patterns: the two give the fp32 weight back exactly, so that no update is too small to count.

Moments are 8-bit codes, 256 of them under one fp32 scale, the largest magnitude among them. A code c of the first
moment stands for +-(c / 127)^2 of it, of the second for (c / 255)^4: fine steps where most values are, and a range of
1 to 65,025 under the root of the second. Rounding is by chance, up as often as the value lies near the upper code: an
average that moves by a thousandth a step would never leave its code otherwise. A second moment that is not zero is
never rounded to zero, because what is divided by it would explode. Chance is a hash of the seed and the entry's place,
the same on every device, rank and run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # entries that share a scale
FIRST_LEVELS = 127
SECOND_LEVELS = 255
SMALLEST_SCALE = 1e-37  # under it, one over the scale would not be finite
WORD = 0xFFFFFFFF
AT_ONCE = 1 << 20  # entries that a CPU goes over at a time, so that what it computes with stays small


@dataclass(frozen=True)
class AdamStepScalars:
    """One step of Adam or AdamW, in the numbers that are the same for all entries.

    rests:   1 - beta, computed in fp64: 1 - 0.999 in fp32 is wrong in the fifth digit
    shrink:  what AdamW's decay leaves of a weight
    decay:   Adam's: so much of the weight is added to its gradient
    stride:  the rate, over the first moment's bias correction
    inverse: one over the root of the second's
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
    """What is kept beside some weights: all of it, or a run of entries."""

    remainder: Tensor
    first: Tensor
    second: Tensor
    first_scale: Tensor
    second_scale: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.remainder, self.first, self.second, self.first_scale, self.second_scale


def split_fp32(exact: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 weights as bf16 and remainders."""
    bits = torch.where(exact == exact, exact, torch.nan).view(torch.int32)  # noqa: PLR0124 - one pattern for all NaN
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_fp32(weight: Tensor, remainder: Tensor) -> Tensor:
    """The reverse."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def scramble(number: int) -> int:
    """A hash of 32 bits (the finalizer of MurmurHash3)."""
    number &= WORD
    number = ((number ^ number >> 16) * 0x85EBCA6B) & WORD
    number = ((number ^ number >> 13) * 0xC2B2AE35) & WORD
    return number ^ number >> 16


def seed_of(piece: int, step: int) -> int:
    """Of one update of one piece; 31 bits, which every language takes for a plain integer."""
    return scramble(scramble(step) ^ (piece * 0x9E3779B1)) >> 1


def chances(seed: int, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each entry from ``start`` on, two numbers in [0, 1)."""
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
    """Rounded exactly; torch's own fp32 root on a CPU is off by one bit for a fifth of all values."""
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
    """One step for a run of entries, in place: the same numbers as the kernel, in plain torch. All are flat."""
    for start in range(0, weight.numel(), AT_ONCE):
        end = min(start + AT_ONCE, weight.numel())
        blocks = slice(start // BLOCK, -(-end // BLOCK))
        codes = state.remainder[start:end], state.first[start:end], state.second[start:end]
        part = LowMemoryState(*codes, state.first_scale[blocks], state.second_scale[blocks])
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
    """In rows that share a scale, the last filled up with zeros."""
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
