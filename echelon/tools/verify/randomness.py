"""Switch dropout off for ``echelon verify``, and detect other random numbers in a model.

Each rank has its own random number stream, so dropout in one process cannot equal dropout on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

#: Attribute names under which modules store their dropout probability.
_PARTS = frozenset(
    {"dropout", "dropout_p", "dropout_prob", "dropout_rate", "drop_prob", "drop_path", "drop_rate", "attn_dropout",
     "attention_dropout", "hidden_dropout", "activation_dropout"}
)  # fmt: skip


def disable_dropout(model: nn.Module) -> list[str]:
    """Switch dropout off in all modules and return the names of the modules that had any."""
    result = []
    for name, module in model.named_modules():
        names = [part for part in _names(module) if _drops(vars(module).get(part))]
        for part in names:
            setattr(module, part, 0.0)
        if names:
            result.append(name)
    return result


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset({"p"}) if isinstance(module, _DropoutNd) else _PARTS


def _drops(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value <= 1.0


def measure_randomness(forward: Callable[[], Tensor], model: nn.Module, device: torch.device) -> float:
    """Return the relative difference between the losses of two passes over one batch with different seeds.

    Buffers are restored after each pass, because running statistics are not random numbers. Gradients stay enabled,
    because a forward may compute gradients itself.
    """
    held = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    kept = [(module, name, buffer, buffer.clone()) for module, name, buffer in held if buffer is not None]

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        result = float(forward().detach())
        with torch.no_grad():
            for module, name, buffer, value in kept:
                module._buffers[name] = buffer.copy_(value)
        return result

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        first, second = loss(1), loss(2)
    return abs(second - first) / max(abs(first), 1e-30) if first != second else 0.0
