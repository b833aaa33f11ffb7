"""Gives optimizer state the strides of its weights: a fused step walks through both by address, not by index."""

from __future__ import annotations

import torch
from torch import Tensor


def follow_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give state the strides of its weight. Files do not store strides, and weights may have changed theirs."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
