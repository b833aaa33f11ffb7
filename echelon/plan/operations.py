"""Modes that observe every operation of a forward pass, between units and inside them, and every read of values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.plan.fake_forward import is_placeholder
from echelon.plan.fake_tensor_rules import has_rule

Tensors = list[Tensor]


class OperationObserver(Protocol):
    """Receives the operations of a forward pass."""

    def computed(self, results: Tensors, operands: Tensors, written: Tensors, draw: str | None) -> None:
        """Record an operation between units.

        results:  tensors that the operation returned
        operands: tensors that it read
        written:  operands that it changed in place
        draw:     name of the operation if it draws random numbers, else None
        """

    def used(self, unit: str, operands: Tensors, written: Tensors) -> None:
        """Record that ``unit`` has read ``operands`` and changed ``written`` in place."""

    def made_inside(self, unit: str, results: Tensors) -> None:
        """Record that an operation of ``unit`` has returned ``results``."""

    def values_read(self, what: str, tensors: Tensors) -> None:
        """Record that the values, and not only the shapes, of ``tensors`` control what happens next.

        what: name of the operation that reads the values
        """


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which ``operation`` executes every torch operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise every operation would first go to the compiler, which skips it because of the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls, and not an operation
            return func(*args)
        return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class InterUnitMode(OperationMode):  # type: ignore[no-untyped-call]
    """Reports each operation between units."""

    def __init__(self, observer: OperationObserver) -> None:
        super().__init__()
        self._observer = observer
        self._uniform: set[StorageWeakRef] = set()  # storages of random draws from [0, 1)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = tensors_in((args, kwargs))
        if _is_certain(func, args) and storage_of(args[0]) in self._uniform:
            operands = []  # the result does not depend on the draw
        if _looks_at_values(func):
            args, looked_at = _with_positions(func, args, operands)
            self._observer.values_read(_as_written(func), looked_at)
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        self._uniform.difference_update(storage_of(tensor) for tensor in written)
        if func in _UNIFORM:
            self._uniform.add(storage_of(result))
        self._observer.computed(tensors_in(result), operands, written, _draw(func))
        return result


class IntraUnitMode(OperationMode):  # type: ignore[no-untyped-call]
    """Reports each operation of one unit."""

    def __init__(self, observer: OperationObserver, unit: str) -> None:
        super().__init__()
        self._observer, self._unit = observer, unit

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._observer.used(self._unit, tensors_in((args, kwargs)), _written(func, args, kwargs))
        result = func(*args, **kwargs)
        self._observer.made_inside(self._unit, tensors_in(result))
        return result


class ValueReadMode(TorchFunctionMode):
    """Reports each conversion of a tensor to Python or numpy values that is not a torch operation."""

    def __init__(self, observer: OperationObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._observer.values_read(func.__name__, tensors_in(args))
        return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to the storage of a tensor, equal for all views of the storage.

    The reference does not keep the memory alive, and no later storage gets the identity of a freed one.
    """
    dense = tensor if tensor.layout is torch.strided else tensor._values()
    return StorageWeakRef(dense.untyped_storage())  # type: ignore[no-untyped-call]


def _written(func: Any, args: Any, kwargs: Any) -> Tensors:
    """Return the operands that the operation changes in place."""
    places = _written_places(func)
    return tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in places]) if places else []


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _as_written(func: Any) -> str:
    return "if, float() or item()" if func is torch.ops.aten._local_scalar_dense.default else str(func)


@functools.cache
def _looks_at_values(func: Any) -> bool:
    """Return True if the result depends on values, not only on shapes, so that fake tensors cannot give it."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return not has_rule(func) and any(tag in func.tags for tag in tags)


@functools.cache
def _draw(func: Any) -> str | None:
    # Attention has this tag with or without dropout; between units it usually has no dropout.
    draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func._schema.name
    return str(func._schema.name) if draws else None


_UNIFORM = (torch.ops.aten.rand.default, torch.ops.aten.rand_like.default)
#: By comparison: returns True for constants with which the comparison gives the same result for all numbers in [0, 1).
_CERTAIN: dict[Any, Callable[[float], bool]] = {
    torch.ops.aten.lt.Scalar: lambda bound: bound <= 0 or bound >= 1,
    torch.ops.aten.ge.Scalar: lambda bound: bound <= 0 or bound >= 1,
    torch.ops.aten.gt.Scalar: lambda bound: bound < 0 or bound >= 1,
    torch.ops.aten.le.Scalar: lambda bound: bound < 0 or bound >= 1,
}


def _is_certain(func: Any, args: Any) -> bool:
    """Return True if the compared draw does not matter, as in layerdrop with a probability of 0."""
    certain = _CERTAIN.get(func)
    return certain is not None and isinstance(args[1], int | float) and certain(args[1])


def _with_positions(func: Any, args: Any, operands: Tensors) -> tuple[Any, Tensors]:
    """Return the arguments of an operation, and the tensors whose values it reads.

    In ``h[mask]`` only the values of the mask are read; the mask becomes positions, so that h may be a fake tensor.
    """
    if func is not torch.ops.aten.index.Tensor:
        return args, operands
    whole, indices, *rest = args
    masks = [one for one in indices if _is_mask(one)]
    if not is_placeholder(whole) or any(map(is_placeholder, masks)):
        return args, masks
    positions: list[Tensor | None] = []
    for one in indices:
        positions.extend(one.nonzero().unbind(1) if _is_mask(one) else [one])
    return (whole, positions, *rest), masks


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
