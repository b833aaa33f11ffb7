"""Optimizer state that lies in memory as its weights do: a fused step goes through both by address, not by index."""

from __future__ import annotations

import torch
from torch import Tensor


def follow_weights(optimizer: torch.optim.Optimizer) -> None:
    """Lay state out as its weight, where it is not. A file has lost how it lay; weights may have been laid out anew."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
