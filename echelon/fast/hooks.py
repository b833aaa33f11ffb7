"""Hooks: what users hang on modules and tensors, which neither a compiled call nor a graph would run."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """Around a call of this module, or of any."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or _has_any_global_hook()  # type: ignore[no-untyped-call]


def has_gradient_hooks(model: nn.Module) -> bool:
    hooks = (
        *((one._backward_hooks, one._post_accumulate_grad_hooks) for one in model.parameters()),
        *((module._backward_hooks, module._backward_pre_hooks) for module in model.modules()),
    )
    return any(any(pair) for pair in hooks)
