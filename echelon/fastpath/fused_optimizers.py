"""Finds torch optimizers that have a fused step, and switches them to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.checkpoint.state_strides import follow_weights

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def leaves_fused_unset(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer has a fused step that gives its results, and user code has not chosen a step."""
    groups = optimizer.param_groups
    open_still = all(group.get("fused") is None and group.get("foreach") is None for group in groups)
    # torch's fused SGD handles a weight's first gradient wrongly if other weights already had one; see _begin_momentum
    plain = not any(group.get("differentiable") or group.get("dampening") for group in groups)
    return type(optimizer) in FUSED and open_still and plain and all(map(_on_gpu, groups))


def _on_gpu(group: Mapping[str, list[nn.Parameter]]) -> bool:
    return all(p.is_cuda and p.is_floating_point() for p in group["params"])


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer use its fused step from now on.

    A fused step needs the step count on the device, and state with the strides of the weights.
    """
    for group in optimizer.param_groups:
        group["fused"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
    follow_weights(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_begin_momentum)


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Create zero momentum for weights that get their first gradient later than others (unfrozen layers, branches).

    Torch's fused step treats either all weights as new or none. Without dampening, zero momentum gives the same result:
    it becomes the gradient in the first step.
    """
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        states = [(one, optimizer.state[one]) for one in group["params"] if one.grad is not None]
        late = [(one, state) for one, state in states if state.get("momentum_buffer") is None]
        if len(late) < len(states):
            for parameter, state in late:
                state["momentum_buffer"] = torch.zeros_like(parameter)
