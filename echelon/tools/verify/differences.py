"""How far two sets of tensors are apart. Pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

#: A tensor that is small beside the others is measured by this part of the largest: what is zero but for rounding (the
#: gradient of a bias before batch norm) has no scale of its own.
FLOOR = 0.1
#: An entry whose two gradients are further apart than this part of it is nothing but rounding. Adam makes full steps of
#: such an entry, in any direction.
ROUNDING = 0.01
#: Entries are rounded in every update, each time by some of the last digit.
LAST_DIGITS = 4.0
#: A parameter with more of them than this is worth a word.
MANY = 0.1


class TensorDifference(NamedTuple):
    """absolute: of the entries that are furthest apart; relative: to the scale of the tensor"""

    absolute: float
    relative: float


def gradient_differences(mine: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, TensorDifference]:
    """By parameter, largest entries compared; one that has a gradient on one side only is infinitely far."""
    scales = {name: _largest(value) for name, value in reference.items()}
    floor = FLOOR * max(scales.values(), default=0.0)
    found: dict[str, TensorDifference] = {}
    for name in dict.fromkeys([*reference, *mine]):
        if name not in mine or name not in reference or mine[name].shape != reference[name].shape:
            found[name] = TensorDifference(math.inf, math.inf)
            continue
        absolute = _largest(mine[name].double() - reference[name].double())
        found[name] = TensorDifference(absolute, _over(absolute, max(scales[name], floor)))
    return found


def weight_differences(
    mine: Mapping[str, Tensor], reference: Mapping[str, Tensor], left_out: Mapping[str, Tensor] | None = None
) -> dict[str, TensorDifference]:
    """By parameter and buffer of floats; relative as root mean squares. ``left_out``: entries that do not count."""
    left_out = left_out or {}
    floats = {name: value for name, value in reference.items() if value.is_floating_point() and value.numel()}
    scales = {name: _mean_size(value) for name, value in floats.items()}
    floor = FLOOR * max(scales.values(), default=0.0)
    found: dict[str, TensorDifference] = {}
    for name, value in floats.items():
        if name not in mine or mine[name].shape != value.shape:
            found[name] = TensorDifference(math.inf, math.inf)
            continue
        apart = mine[name].double() - value.double()
        apart = apart.masked_fill(left_out[name], 0.0) if name in left_out else apart
        found[name] = TensorDifference(_largest(apart), _over(_mean_size(apart), max(scales[name], floor)))
    return found


def movement_differences(
    mine: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    left_out: Mapping[str, Tensor],
    updates: int,
) -> dict[str, float]:
    """By parameter of ``initial``, how far it is apart beside how far training has moved it: small steps say nothing
    beside the weights themselves. What rounding may come to in so many updates is nothing."""
    found: dict[str, float] = {}
    for name, start in initial.items():
        if name not in mine or mine[name].shape != start.shape or name not in reference:
            continue  # of which the weights tell
        apart = mine[name].double() - reference[name].double()
        far = _mean_size(apart.masked_fill(left_out[name], 0.0) if name in left_out else apart)
        digits = LAST_DIGITS * updates * torch.finfo(mine[name].dtype).eps * _mean_size(reference[name])
        moved = max(_mean_size(one[name].double() - start.double()) for one in (mine, reference))
        found[name] = _over(far, moved) if far > digits else 0.0
    return found


def rounding(mine: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By parameter, the entries whose gradient is rounding alone."""
    both = [name for name, value in reference.items() if name in mine and mine[name].shape == value.shape]
    return {name: (mine[name] - reference[name]).abs() > ROUNDING * reference[name].abs() for name in both}


def mostly(entries: Mapping[str, Tensor]) -> list[str]:
    """Parameters with many such entries."""
    return [name for name, marked in entries.items() if marked.numel() and float(marked.float().mean()) > MANY]


def relative(mine: float, reference: float) -> float:
    """Of two losses."""
    return 0.0 if mine == reference else _over(abs(mine - reference), abs(reference))


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
