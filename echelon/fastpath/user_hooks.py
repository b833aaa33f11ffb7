"""Detects hooks of user code on modules and tensors, which neither a compiled call nor a CUDA graph would run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """Return True if this module has hooks around its call, or if there are global module hooks."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or _has_any_global_hook()  # type: ignore[no-untyped-call]


def has_gradient_hooks(model: nn.Module) -> bool:
    of_modules = any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
    return of_modules or on_gradients(model.parameters())


def on_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if one of these parameters has a Python hook on its gradient."""
    return any(one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters)
