"""Admission of ids to a device table, by the same counts and draws as in ``table.claims``."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.parameter_server.device_table.signed_hash import mix, shifted, signed
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table.index import EMPTY
from echelon.parameter_server.table.records import COUNT

_SALT = signed(0xD1B54A32D192ED03)
_WAITS, _LATEST = -(1 << 62), 0xFFFFFFFF  # sign bit and changed flag; 32 bits of the time of the last push


def pushes(values: Tensor) -> Tensor:
    """Return the number of earlier pushes of ids without a row."""
    return torch.where(values == EMPTY, 0, (values >> 32) & COUNT)


def waiting(counts: Tensor, seen: int) -> Tensor:
    """Return the index values of ids that wait for admission after a push."""
    return (counts.clamp(max=COUNT - 1) << 32) + (_WAITS + (seen & _LATEST))


def admits(spec: TableSpec, ids: Tensor, counts: Tensor) -> Tensor:
    """Return True for ids that are admitted at their ``counts``-th push."""
    enough = counts >= spec.admit_after
    if spec.admit_probability >= 1:
        return enough
    seed = torch.tensor(signed(signed(spec.seed) ^ _SALT), device=ids.device)
    drawn = mix(mix(mix(seed) ^ ids) + counts * _SALT)
    return enough & (shifted(drawn, 11).double() * 2.0**-53 < spec.admit_probability)
