"""Structure of a model besides weights and plain values: classes, submodules, and the tensors that modules hold."""

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
#: The dicts in which a module registers parameters, buffers and submodules.
REGISTERS = ("_parameters", "_buffers", "_modules")
#: Attributes that every module has.
INTERNAL = frozenset(vars(nn.Module()))
_VALUES = operator.methodcaller("values")


class ModuleStructure:
    """The structure of a model at one moment; a comparison takes some microseconds per hundred modules."""

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
        # kept alive, so that their addresses are not reused
        self._alive = [*model.parameters(), *(own[name] for own, name in self._held if self._is_of_host(own[name]))]

    def is_as_it_was(self) -> bool:
        return self._now() == self._before

    def _now(self) -> tuple[list[Any], ...]:
        return (
            list(map(type, self._modules)),
            list(map(len, self._own)),  # forward may read a new attribute by getattr()
            list(map(id, _entries(self._parts))),
            list(map(self._which, _entries(self._buffers))),
            [self._which(own.get(name)) for own, name in self._held],
        )

    def _is_of_host(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or value.device != self._device

    def _which(self, value: Any) -> Any:
        """Return the identity of a value; for host tensors with the version, as their contents may be constants."""
        return place_of(value, self._is_of_host(value)) if isinstance(value, Tensor) else id(value)


def _entries(registers: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_VALUES, registers))


def place_of(tensor: Tensor, with_version: bool = False) -> tuple[int, int]:
    """Return the tensor's address, and its version if asked for; for a tensor without storage (sparse), its id."""
    try:
        return tensor.data_ptr(), tensor._version if with_version else 0
    except RuntimeError:
        return id(tensor), 0


def same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal; NaN equals NaN.

    Values of different types are never compared with ``==``, because one of them may be a tensor.
    """
    return one is other or (type(one) is type(other) and (one == other or (is_nan(one) and is_nan(other))))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
