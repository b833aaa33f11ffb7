"""Optimizers whose step is one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.state_strides import follow_weights


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """From now on. It wants the number of steps on the device, where a step before left it here, and state that lies as
    its weights do."""
    for group in optimizer.param_groups:
        group["fused"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
    follow_weights(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_begin_momentum)


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Momentum of weights that get their first gradient later than others (a layer that is thawed, a branch): torch's
    fused step takes all for first, or none. Without dampening, it begins with the gradient from nought as well."""
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        states = [(one, optimizer.state[one]) for one in group["params"] if one.grad is not None]
        late = [(one, state) for one, state in states if state.get("momentum_buffer") is None]
        if len(late) < len(states):
            for parameter, state in late:
                state["momentum_buffer"] = torch.zeros_like(parameter)
