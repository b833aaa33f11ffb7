"""Which modules are called, which only hold others, and which of them cannot be given another class."""

from __future__ import annotations

import torch
from torch import nn

from echelon.base.errors import UsageError


def is_called(module: nn.Module) -> bool:
    """A ModuleList or ModuleDict never is. The class of a scripted module has no forward, and it is."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def why_fixed(name: str, module: nn.Module) -> str | None:
    """Return why the module cannot be given a class with another forward, and the remedy; None if it can."""
    whose = f"'{name}'" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        return f"{whose} was compiled by torch.jit.script, which reads parameters past Python; build it without"
    if "_orig_mod" in module._modules and "forward" in module.__dict__:
        return f"{whose} was compiled by torch.compile; give distribute() the model as it was before"
    if "forward" in module.__dict__:
        return f"forward() of {whose} was replaced on the module itself; replace it in its class"
    return None


def refuse_scripted(model: nn.Module) -> None:
    """Raise where a module could not be recorded for a pipeline."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"pipeline: {why_fixed(name, module)}, or train it without stages")
