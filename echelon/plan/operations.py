"""Seeing every operation of a forward pass: between units, inside one, and ways to values that are no operations."""

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
    """Who is told what."""

    def computed(self, results: Tensors, operands: Tensors, written: Tensors, draw: str | None) -> None:
        """Between units: ``results`` were made from ``operands`` and, where ``draw`` names them, random numbers."""

    def used(self, unit: str, operands: Tensors, written: Tensors) -> None:
        """A unit has read its ``operands`` and written to some."""

    def looked(self, what: str, tensors: Tensors) -> None:
        """Values, and not only shapes, of these tensors decide what happens next."""


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, ``operation`` does every operation in torch's place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation would first go to the compiler, to hear that modes are not compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all, and no operation
            return func(*args)
        return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class InterUnitMode(OperationMode):  # type: ignore[no-untyped-call]
    """Tells of each operation of glue."""

    def __init__(self, observer: OperationObserver) -> None:
        super().__init__()
        self._observer = observer
        self._uniform: set[StorageWeakRef] = set()  # draws from [0, 1)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = tensors_in((args, kwargs))
        if _is_certain(func, args) and storage_of(args[0]) in self._uniform:
            operands = []  # whatever was drawn, the answer is the same
        if _looks_at_values(func):
            args, looked_at = _with_positions(func, args, operands)
            self._observer.looked(_as_written(func), looked_at)
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        self._uniform.difference_update(storage_of(tensor) for tensor in written)
        if func in _UNIFORM:
            self._uniform.add(storage_of(result))
        self._observer.computed(tensors_in(result), operands, written, _draw(func))
        return result


class IntraUnitMode(OperationMode):  # type: ignore[no-untyped-call]
    """Tells of each operation of one unit."""

    def __init__(self, observer: OperationObserver, unit: str) -> None:
        super().__init__()
        self._observer, self._unit = observer, unit

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._observer.used(self._unit, tensors_in((args, kwargs)), _written(func, args, kwargs))
        return func(*args, **kwargs)


class ValueReadMode(TorchFunctionMode):
    """Tells when a tensor becomes Python or numpy values other than by an operation."""

    def __init__(self, observer: OperationObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._observer.looked(func.__name__, tensors_in(args))
        return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return what views of one memory share. Weak: it lets memory go, and yet no other storage gets the identity of one
    that is gone."""
    dense = tensor if tensor.layout is torch.strided else tensor._values()
    return StorageWeakRef(dense.untyped_storage())  # type: ignore[no-untyped-call]


def _written(func: Any, args: Any, kwargs: Any) -> Tensors:
    """The operands that the operation writes to."""
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
    """Whether values, and not only shapes, decide what comes out: placeholders cannot tell."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return not has_rule(func) and any(tag in func.tags for tag in tags)


@functools.cache
def _draw(func: Any) -> str | None:
    # Attention is tagged so with or without dropout; between units it has none, as a rule.
    draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func._schema.name
    return str(func._schema.name) if draws else None


_UNIFORM = (torch.ops.aten.rand.default, torch.ops.aten.rand_like.default)
#: By comparison, those constants for which its answer for numbers of [0, 1) is the same whatever they are.
_CERTAIN: dict[Any, Callable[[float], bool]] = {
    torch.ops.aten.lt.Scalar: lambda bound: bound <= 0 or bound >= 1,
    torch.ops.aten.ge.Scalar: lambda bound: bound <= 0 or bound >= 1,
    torch.ops.aten.gt.Scalar: lambda bound: bound < 0 or bound >= 1,
    torch.ops.aten.le.Scalar: lambda bound: bound < 0 or bound >= 1,
}


def _is_certain(func: Any, args: Any) -> bool:
    """Return True if the draw does not matter, as where layerdrop compares it with a probability of 0."""
    certain = _CERTAIN.get(func)
    return certain is not None and isinstance(args[1], int | float) and certain(args[1])


def _with_positions(func: Any, args: Any, operands: Tensors) -> tuple[Any, Tensors]:
    """The arguments, and the tensors whose values are looked at. In ``h[mask]`` that is the mask alone; given as
    positions, h may be a placeholder."""
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
