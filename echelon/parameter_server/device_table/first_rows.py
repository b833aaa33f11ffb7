"""Initial rows in torch's operations, from (seed, id) alone.

Uniform and constant ones have the bits of the CPU table; normal ones are off by a unit of the last place at most,
because libraries differ in logarithm and cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echelon.parameter_server.device_table.signed_hash import LOW_HALF, mix, shifted, signed
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import initial
from echelon.parameter_server.table.initial import CONSTANT, NORMAL
from echelon.strategy.sparse_update_rules import state_width

#: Increment of splitmix64.
STEP = signed(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class FirstRows:
    """The initial rows of a table.

    seed:   hashed seed of the table
    kind:   UNIFORM, NORMAL or CONSTANT of ``table.initial``
    low:    least value, mean or constant
    span:   width of the interval, or standard deviation
    top:    largest value
    start:  value of the first ``filled`` floats of the state; the others are 0
    """

    dim: int
    state: int
    seed: int
    kind: int
    low: float
    span: float
    top: float
    start: float
    filled: int

    @classmethod
    def of(cls, spec: TableSpec) -> FirstRows:
        kind, low, span, top, start, filled = initial.described(spec.initializer, spec.rule, spec.dim).tolist()
        seed = int(mix(torch.tensor(signed(spec.seed % 2**64) + 0) + STEP))
        span = float(np.float32(span)) if kind != NORMAL else span
        if kind != NORMAL:
            low, top = float(np.float32(low)), float(np.float32(top))
        start, state = float(np.float32(start)), state_width(spec.rule, spec.dim)
        return cls(spec.dim, state, seed, int(kind), low, span, top, start, int(filled))

    def rows(self, ids: Tensor, width: int) -> Tensor:
        """Return the first ``width`` floats of the initial row of each id."""
        out = torch.zeros(len(ids), width, device=ids.device)
        out[:, : self.dim] = self._weights(ids)
        out[:, self.dim : self.dim + self.filled] = self.start
        return out

    def _weights(self, ids: Tensor) -> Tensor:
        if self.kind == CONSTANT or (self.kind != NORMAL and not self.span > 0):
            return torch.full((len(ids), self.dim), self.low, device=ids.device)
        columns = torch.arange(self.dim, device=ids.device)
        drawn = mix(mix(ids ^ self.seed)[:, None] + (1 + (columns >> 1)) * STEP)
        is_odd = (columns & 1).bool()
        if self.kind == NORMAL:  # Box-Muller transform
            radius = torch.sqrt(-2.0 * torch.log((shifted(drawn, 32).double() + 1.0) * 2.0**-32))
            angle = 2 * math.pi * (drawn & LOW_HALF).double() * 2.0**-32
            return (self.low + self.span * radius * torch.where(is_odd, angle.sin(), angle.cos())).float()
        share = (torch.where(is_odd, shifted(drawn, 32), drawn & LOW_HALF) >> 8).float() * 2.0**-24
        return (share * self.span + self.low).clamp(max=self.top)  # rounding may reach the end of the interval
