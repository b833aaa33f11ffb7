"""Differences between two sets of tensors. Pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

#: The scale of a tensor is at least this fraction of the largest scale: a tensor that is zero but for rounding (the
#: gradient of a bias before batch norm) has no scale of its own.
FLOOR = 0.1
#: An entry whose two gradients differ relatively by more than this is only rounding error. Adam makes full steps for
#: such an entry, in any direction.
ROUNDING = 0.01
#: Rounding error of an entry per update, in units of the dtype's epsilon.
LAST_DIGITS = 4.0
#: A parameter is reported if a larger fraction of its entries is only rounding error.
MANY = 0.1


class TensorDifference(NamedTuple):
    """The difference between two tensors.

    absolute: largest absolute difference of two entries
    relative: difference relative to the scale of the tensor
    """

    absolute: float
    relative: float


def gradient_differences(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, TensorDifference]:
    """Return the gradient differences by parameter name, relative to the largest absolute entry.

    The difference is infinite if only one side has a gradient, or if the shapes differ.
    """
    scales = {name: _largest(value) for name, value in reference.items()}
    floor = FLOOR * max(scales.values(), default=0.0)
    result: dict[str, TensorDifference] = {}
    for name in dict.fromkeys([*reference, *own]):
        if name not in own or name not in reference or own[name].shape != reference[name].shape:
            result[name] = TensorDifference(math.inf, math.inf)
            continue
        absolute = _largest(own[name].double() - reference[name].double())
        result[name] = TensorDifference(absolute, _over(absolute, max(scales[name], floor)))
    return result


def weight_differences(
    own: Mapping[str, Tensor], reference: Mapping[str, Tensor], left_out: Mapping[str, Tensor] | None = None
) -> dict[str, TensorDifference]:
    """Return the differences of floating-point parameters and buffers by name; relative differences are ratios of RMS.

    left_out: masks of entries to ignore
    """
    left_out = left_out or {}
    floats = {name: value for name, value in reference.items() if value.is_floating_point() and value.numel()}
    scales = {name: _mean_size(value) for name, value in floats.items()}
    floor = FLOOR * max(scales.values(), default=0.0)
    result: dict[str, TensorDifference] = {}
    for name, value in floats.items():
        if name not in own or own[name].shape != value.shape:
            result[name] = TensorDifference(math.inf, math.inf)
            continue
        apart = own[name].double() - value.double()
        apart = apart.masked_fill(left_out[name], 0.0) if name in left_out else apart
        result[name] = TensorDifference(_largest(apart), _over(_mean_size(apart), max(scales[name], floor)))
    return result


def movement_differences(
    own: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    left_out: Mapping[str, Tensor],
    updates: int,
) -> dict[str, float]:
    """Return each parameter's difference relative to the distance that training has moved the parameter (RMS).

    Small updates are invisible relative to the weights themselves. A difference that rounding can explain in this
    number of updates counts as 0.

    initial:  parameters before the first update
    left_out: masks of entries to ignore
    """
    result: dict[str, float] = {}
    for name, start in initial.items():
        if name not in own or own[name].shape != start.shape or name not in reference:
            continue  # ``weight_differences`` reports these
        apart = own[name].double() - reference[name].double()
        far = _mean_size(apart.masked_fill(left_out[name], 0.0) if name in left_out else apart)
        digits = LAST_DIGITS * updates * torch.finfo(own[name].dtype).eps * _mean_size(reference[name])
        moved = max(_mean_size(one[name].double() - start.double()) for one in (own, reference))
        result[name] = _over(far, moved) if far > digits else 0.0
    return result


def rounding(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, by parameter name, a mask of the entries whose gradient is only rounding error."""
    both = [name for name, value in reference.items() if name in own and own[name].shape == value.shape]
    return {name: (own[name] - reference[name]).abs() > ROUNDING * reference[name].abs() for name in both}


def mostly(entries: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters with more than ``MANY`` of their entries marked."""
    return [name for name, marked in entries.items() if marked.numel() and float(marked.float().mean()) > MANY]


def relative(own: float, reference: float) -> float:
    """Return the relative difference of two losses."""
    return 0.0 if own == reference else _over(abs(own - reference), abs(reference))


def _largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    return _known(float(value.abs().max()))


def _mean_size(value: Tensor) -> float:
    return _known(float(torch.linalg.vector_norm(value.double())) / math.sqrt(max(1, value.numel())))


def _over(size: float, scale: float) -> float:
    if size == 0.0:
        return 0.0
    return size / scale if scale and math.isfinite(scale) else math.inf


def _known(size: float) -> float:
    return math.inf if math.isnan(size) else size
