"""Detection of replica drift: ranks that should hold the same weights but do not.

A change of the weights on one rank alone does not show at once in losses or gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.distributed.tensor_layout import Part
from echelon.tools.verify.differences import LAST_DIGITS

#: Checksums of one parameter on one rank: name, part of the parameter that this rank holds, number of elements, sum,
#: sum of squares, and epsilon of the dtype.
Held = list[Any]


@torch.no_grad()
def sums_of(name: str, value: Tensor | Part) -> Held:
    tensor, part = (value.tensor, str(value.layout.parts)) if isinstance(value, Part) else (value, "")
    digit = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    wide = tensor.double()
    return [name, part, tensor.numel(), float(wide.sum()), float(wide.square().sum()), digit]


def find_drift(found: Sequence[Sequence[Held]], updates: int) -> list[Any] | None:
    """Return the first parameter that differs: its name, a lower bound of the relative difference, and the two ranks.

    found:   checksums, one list per rank
    updates: number of updates so far; each allows some rounding error
    """
    first: dict[tuple[str, str], tuple[int, Held]] = {}
    for rank, held in enumerate(found):
        for one in held:
            other, beside = first.setdefault((one[0], one[1]), (rank, one))
            far = _apart(one, beside)
            if far > LAST_DIGITS * updates * one[5]:
                return [one[0], far, other, rank]
    return None


def _apart(one: Held, other: Held) -> float:
    """Return a lower bound of the relative difference of two parts of equal size, from their checksums."""
    _, _, count, linear, squares, _ = one
    if not count or (linear, squares) == (other[3], other[4]):
        return 0.0
    size = max(squares, other[4])
    return max(abs(squares - other[4]) / size, abs(linear - other[3]) / math.sqrt(count * size)) if size else 0.0
