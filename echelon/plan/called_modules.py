"""Properties of modules: whether they are called or only hold others, and whether their class can be replaced."""

from __future__ import annotations

import torch
from torch import nn

from echelon.base.errors import UsageError


def is_called(module: nn.Module) -> bool:
    """Return True if the module can be called.

    A ModuleList or ModuleDict cannot. A scripted module can, although its class has no forward.
    """
    return getattr(type(module), "forward", None) is not nn.Module.forward


def why_fixed(name: str, module: nn.Module) -> str | None:
    """Return the reason why the module's class cannot be replaced by one with another forward, and the remedy.

    The result is None if the class can be replaced.
    """
    whose = f"'{name}'" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        return f"{whose} was compiled by torch.jit.script, which reads parameters outside Python; build it plain"
    if "_orig_mod" in module._modules and "forward" in module.__dict__:
        return f"{whose} was compiled by torch.compile; give distribute() the model as it was before"
    if "forward" in module.__dict__:
        return f"forward() of {whose} was replaced on the module itself; replace it in its class"
    return None


def refuse_scripted(model: nn.Module) -> None:
    """Raise ``UsageError`` if a module is scripted, because it cannot be recorded for a pipeline."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"pipeline: {why_fixed(name, module)}, or train it without stages")
