"""Removes torch's parallel wrappers from a model."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from echelon.base.errors import UsageError

#: Torch's classes that shard parameters, compared by name, because importing their module takes 1 s.
CUTTING = ("FullyShardedDataParallel", "FSDPModule")


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model inside torch's wrappers, and a log line on it; the line is '' without wrappers.

    If user code still calls the wrapper in its own loop, the wrapper no longer reduces gradients; the engine does.
    """
    line = ""
    while isinstance(model, DistributedDataParallel | DataParallel):
        kind = type(model).__name__
        line = f"model: {kind} was taken off, since the engine reduces gradients itself; pass the model without it"
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = False
        model = model.module
    for name, module in model.named_modules():
        _refuse(name, module)
    return model, line


def _refuse(name: str, module: nn.Module) -> None:
    where = f"'{name}'" if name else "the model"
    if isinstance(module, DistributedDataParallel):
        raise UsageError(
            f"{where} is wrapped in DistributedDataParallel, and the engine reduces gradients itself; put its .module "
            "in its place"
        )
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.distributed.")]
    if any(kind in CUTTING for kind in kinds):
        raise UsageError(
            f"{where} was sharded by torch's FSDP, and the engine shards by itself; pass the model as it was before, "
            "with Strategy(shard=3)"
        )
