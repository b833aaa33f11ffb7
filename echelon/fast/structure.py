"""What modules are made of, beside their weights and plain values: classes, parts, and which tensors they hold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

#: Types of values that are compared as they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Where a module keeps what has names of its own.
REGISTERS = ("_parameters", "_buffers", "_modules")
#: What every module has.
INTERNAL = frozenset(vars(nn.Module()))


class Structure:
    """As it was; it takes some microseconds a hundred modules to see whether it still is."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._modules = list(model.modules())
        self._own: list[dict[str, Any]] = [vars(module) for module in self._modules]
        self._parts = [module._modules for module in self._modules]
        self._buffers = [module._buffers for module in self._modules]
        self._weights = [module._parameters for module in self._modules]
        self._held = [
            (own, name)
            for own in self._own
            for name, value in own.items()
            if name not in INTERNAL and not isinstance(value, PLAIN)
        ]
        self._before = self._now()
        # kept, so that no other gets their addresses
        self._alive = [*model.parameters(), *(own[name] for own, name in self._held if self._is_of_host(own[name]))]

    def is_as_it_was(self) -> bool:
        return self._now() == self._before

    def _now(self) -> tuple[list[Any], ...]:
        return (
            list(map(type, self._modules)),
            list(map(len, self._own)),  # one that forward asks for by getattr() may be new
            [id(part) for parts in self._parts for part in parts.values()],
            [id(weight) for weights in self._weights for weight in weights.values()],
            [self._which(buffer) for buffers in self._buffers for buffer in buffers.values()],
            [self._which(own.get(name)) for own, name in self._held],
        )

    def _is_of_host(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or value.device != self._device

    def _which(self, value: Any) -> Any:
        """Contents of tensors beside the device are read by the host, if at all, and then written into a graph."""
        return place_of(value, self._is_of_host(value)) if isinstance(value, Tensor) else id(value)


def place_of(tensor: Tensor, with_version: bool = False) -> tuple[int, int]:
    """Where it lies, and how often it was written to. Of one without memory of its own (sparse), which one it is."""
    try:
        return tensor.data_ptr(), tensor._version if with_version else 0
    except RuntimeError:
        return id(tensor), 0


def same(one: Any, other: Any) -> bool:
    """Of plain values: not a number is the same as itself."""
    return one is other or one == other or (is_nan(one) and is_nan(other))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
