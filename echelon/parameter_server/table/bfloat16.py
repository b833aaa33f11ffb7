"""Rows and gradients as bfloat16, for the wire between hosts: the upper 16 bits of a float32, rounded to even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.table.compiled import kernel, readable

Halves = NDArray[np.uint16]
Float32s = NDArray[np.float32]

_HALF, _ODD, _QUIET, _MAGNITUDE, _INFINITY = (np.uint32(n) for n in (0x7FFF, 1, 0x40, 0x7FFFFFFF, 0x7F800000))
_SHIFT = np.uint32(16)


def narrow(values: Float32s) -> Halves:
    """Return the nearest bfloat16 of each value as its 16 bits; a NaN stays a NaN."""
    out = np.empty(values.size, np.uint16)
    _narrow(readable(values.reshape(-1), np.float32).view(np.uint32), out)
    return out


def widen(halves: NDArray[Any]) -> Float32s:
    """Return the float32 of each bfloat16."""
    wide: Float32s = (halves.astype(np.uint32) << _SHIFT).view(np.float32)
    return wide


@kernel
def _narrow(bits: NDArray[np.uint32], out: Halves) -> None:
    for i in range(len(bits)):
        word = bits[i]
        if word & _MAGNITUDE > _INFINITY:
            out[i] = np.uint16((word >> _SHIFT) | _QUIET)
        else:
            out[i] = np.uint16((word + _HALF + ((word >> _SHIFT) & _ODD)) >> _SHIFT)
