"""Which modules are called, and which only hold others."""

from __future__ import annotations

from torch import nn


def is_called(module: nn.Module) -> bool:
    """A ModuleList or ModuleDict never is. The class of a scripted module has no forward, and it is."""
    return getattr(type(module), "forward", None) is not nn.Module.forward
