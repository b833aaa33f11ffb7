"""What modules are made of, beside their weights and plain values: classes, parts, and which tensors they hold."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Types of values that are compared as they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Where a module keeps what has names of its own.
REGISTERS = ("_parameters", "_buffers", "_modules")
#: What every module has.
INTERNAL = frozenset(vars(nn.Module()))
_VALUES = operator.methodcaller("values")


class ModuleStructure:
    """As it was; it takes some microseconds a hundred modules to see whether it still is."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._modules = list(model.modules())
        self._own: list[dict[str, Any]] = [vars(module) for module in self._modules]
        self._parts = [one for module in self._modules for one in (module._modules, module._parameters)]
        self._buffers = [module._buffers for module in self._modules]
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
            list(map(id, _entries(self._parts))),
            list(map(self._which, _entries(self._buffers))),
            [self._which(own.get(name)) for own, name in self._held],
        )

    def _is_of_host(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or value.device != self._device

    def _which(self, value: Any) -> Any:
        """Contents of tensors beside the device are read by the host, if at all, and then written into a graph."""
        return place_of(value, self._is_of_host(value)) if isinstance(value, Tensor) else id(value)


def _entries(registers: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_VALUES, registers))


def place_of(tensor: Tensor, with_version: bool = False) -> tuple[int, int]:
    """Where it lies, and how often it was written to. Of one without memory of its own (sparse), which one it is."""
    try:
        return tensor.data_ptr(), tensor._version if with_version else 0
    except RuntimeError:
        return id(tensor), 0


def same(one: Any, other: Any) -> bool:
    """Of plain values: not a number is the same as itself. What is of another type now may be a tensor, which is not
    asked whether it is equal."""
    return one is other or (type(one) is type(other) and (one == other or (is_nan(one) and is_nan(other))))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
