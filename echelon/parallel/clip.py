"""Clipping by global norm, for dense and sparse gradients together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``; returns the norm they had."""
    grads = [p.grad for p in parameters if p.grad is not None]
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    if not values:
        return torch.zeros(())
    total = nn.utils.get_total_norm(values)
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's own formula, so that the numbers agree
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, coefficient)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(coefficient)
    return total
