"""``RegionTensor``: a tensor whose values are read later, and only the region that is asked for.

Names and shapes in a model's files often differ from the module's: experts lie one by one in the files and stacked in
the module, projections are fused or split. The libraries that know these conversions write them as operations on
tensors. On region tensors the same operations read nothing: cat, stack, split, select, transpose and cast are
remembered, and a region of the result asks for the matching regions of the operands. Of any other operation the
operands are read whole, each time a region of its result is read: exact, and bounded by the tensors that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from echelon.base.errors import CheckpointError
from echelon.checkpoint.weight_source import WeightSource
from echelon.distributed.tensor_region import TensorRegion, narrow

Numbers = tuple[int, ...]
aten = torch.ops.aten


class RegionReader(Protocol):
    """Reads a region of one tensor: ``sizes`` from ``offsets`` on."""

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor: ...


class RegionTensor(Tensor):
    """A tensor whose values a reader returns, region by region. Operations on it return region tensors."""

    reader: RegionReader

    @staticmethod
    def __new__(cls, reader: RegionReader, shape: Sequence[int], dtype: torch.dtype) -> RegionTensor:
        cpu = torch.device("cpu")
        made: RegionTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=cpu)
        made.reader = reader
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RegionTensor({list(self.shape)}, {self.dtype})"

    def read_region(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        """Return the values of a region: ``sizes`` from ``offsets`` on."""
        return self.reader.read(tuple(offsets), tuple(sizes))

    def read_whole(self) -> Tensor:
        """Return all values."""
        return self.read_region((0,) * self.dim(), tuple(self.shape))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func._schema.is_mutable:
            return _change(func, args, given)
        with torch.no_grad():
            try:
                shapes = _SHAPES.get(func, func)(*_on_meta(args), **_on_meta(given))
            except (NotImplementedError, RuntimeError):  # the result depends on values
                return func(*_values(args), **_values(given))
        rule = _RULES.get(func)
        readers = rule(*args, **given) if rule is not None else None
        if isinstance(shapes, Tensor):
            reader = readers[0] if readers else _Computed(func, args, given, None)
            return RegionTensor(reader, shapes.shape, shapes.dtype)
        if not isinstance(shapes, list | tuple):
            return func(*_values(args), **_values(given))
        made = [
            RegionTensor(readers[i] if readers else _Computed(func, args, given, i), shape.shape, shape.dtype)
            for i, shape in enumerate(shapes)
        ]
        return type(shapes)(made)


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionTensor:
    """Let an operation in place change a result that is no view; weights themselves cannot be changed."""
    target = args[0] if args and func._schema.arguments[0].is_write else None
    if not isinstance(target, RegionTensor) or not isinstance(target.reader, _Computed) or target.reader.is_view:
        raise CheckpointError(f"{func} would change weights that are kept in files; change them after they are loaded")
    former = RegionTensor(target.reader, target.shape, target.dtype)
    target.reader = _Computed(func, (former, *args[1:]), kwargs, None)
    return target


def region_tensors(source: WeightSource) -> dict[str, RegionTensor]:
    """Return all tensors of a source by name, unread."""
    return {
        name: RegionTensor(_Stored(source, name), source.shape(name), source.dtype(name)) for name in source.names()
    }


class RegionWeights:
    """A ``WeightSource`` over tensors of which some are region tensors, such as a converted state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, region: TensorRegion) -> Tensor:
        tensor = self._tensors[name]
        if tuple(tensor.shape) != region.shape:
            raise CheckpointError(
                f"'{name}' is {list(tensor.shape)} in the given weights and {list(region.shape)} in the model; "
                "give the weights of this model"
            )
        if isinstance(tensor, RegionTensor):
            return tensor.read_region(region.offsets, region.sizes).contiguous()
        return region.view_of(tensor.detach()).cpu().clone(memory_format=torch.contiguous_format)


class _Stored:
    def __init__(self, source: WeightSource, name: str) -> None:
        self._source, self._name = source, name

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        source, name = self._source, self._name
        return source.read(name, TensorRegion(name, source.dtype(name), source.shape(name), offsets, sizes))


class _Plain:
    """Reads regions of an ordinary tensor that an operation combines with region tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        return narrow(self._tensor, offsets, sizes)


class _Joined:
    """Tensors joined along ``dim``."""

    def __init__(self, parts: Sequence[Tensor], dim: int) -> None:
        self._parts, self._dim = [part for part in parts if tuple(part.shape) != (0,)], dim

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        dim, at, found = self._dim % len(sizes), 0, []
        for part in self._parts:
            length = part.shape[dim]
            begin, end = max(offsets[dim], at), min(offsets[dim] + sizes[dim], at + length)
            if begin < end:
                found.append(_reader(part).read(_put(offsets, dim, begin - at), _put(sizes, dim, end - begin)))
            at += length
        if not found:
            return torch.empty(sizes, dtype=self._parts[0].dtype)
        return found[0] if len(found) == 1 else torch.cat(found, dim)


class _Shifted:
    """A range of ``base`` along ``dim``, from ``begin`` on."""

    def __init__(self, base: Tensor, dim: int, begin: int) -> None:
        self._base, self._dim, self._begin = base, dim % base.dim(), begin

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        return _reader(self._base).read(_put(offsets, self._dim, offsets[self._dim] + self._begin), sizes)


class _Selected:
    """One index of ``base`` along ``dim``, without that dimension."""

    def __init__(self, base: Tensor, dim: int, index: int) -> None:
        self._base, self._dim = base, dim % base.dim()
        self._index = index % base.shape[self._dim]

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        dim = self._dim
        inner = _reader(self._base).read((*offsets[:dim], self._index, *offsets[dim:]), (*sizes[:dim], 1, *sizes[dim:]))
        return inner.squeeze(dim)


class _Unsqueezed:
    """``base`` with a dimension of size 1 at ``dim``."""

    def __init__(self, base: Tensor, dim: int) -> None:
        self._base, self._dim = base, dim % (base.dim() + 1)

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        dim = self._dim
        inner = _reader(self._base).read(offsets[:dim] + offsets[dim + 1 :], sizes[:dim] + sizes[dim + 1 :])
        return inner.unsqueeze(dim)[narrowed(dim, sizes[dim])]


class _Permuted:
    """``base`` with its dimensions in another order."""

    def __init__(self, base: Tensor, dims: Sequence[int]) -> None:
        self._base, self._dims = base, [dim % base.dim() for dim in dims]

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        begins, lengths = list(offsets), list(sizes)
        for outer, dim in enumerate(self._dims):
            begins[dim], lengths[dim] = offsets[outer], sizes[outer]
        return _reader(self._base).read(tuple(begins), tuple(lengths)).permute(self._dims)


class _Cast:
    """``base`` in another dtype."""

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        self._base, self._dtype = base, dtype

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        return _reader(self._base).read(offsets, sizes).to(self._dtype)


class _Computed:
    """A result of an operation that needs its operands whole.

    index:  position among several results; None if there is one
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        self._func, self._args, self._kwargs, self._index = func, args, kwargs, index

    @property
    def is_view(self) -> bool:
        return any(argument.alias_info and not argument.is_write for argument in self._func._schema.arguments)

    def read(self, offsets: Numbers, sizes: Numbers) -> Tensor:
        result = self._func(*_values(self._args), **_values(self._kwargs))
        return narrow(result if self._index is None else result[self._index], offsets, sizes)


def narrowed(dim: int, size: int) -> tuple[slice, ...]:
    """Return the index of the first ``size`` entries along ``dim``."""
    return (*[slice(None)] * dim, slice(0, size))


def _reader(tensor: Tensor) -> RegionReader:
    return tensor.reader if isinstance(tensor, RegionTensor) else _Plain(tensor)


def _put(numbers: Numbers, dim: int, value: int) -> Numbers:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _on_meta(tree: Any) -> Any:
    plain = tree_map_only(RegionTensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), plain)


def _values(tree: Any) -> Any:
    return tree_map_only(RegionTensor, lambda tensor: tensor.read_whole().contiguous(), tree)


# ---- rules: the readers of an operation's results ----


def _same(base: RegionTensor, *_: Any, **__: Any) -> list[RegionReader]:
    return [base.reader]


def _meta_cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the shape and dtype of a ``cat``, as a meta tensor. Torch's own imports 800 modules for it, 2 s."""
    real = [part for part in parts if tuple(part.shape) != (0,)] or list(parts[:1])
    shape = list(real[0].shape)
    shape[dim] = sum(part.shape[dim] for part in real)
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta_stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _meta_cat([part.unsqueeze(dim) for part in parts], dim)


def _cat(parts: Sequence[Tensor], dim: int = 0) -> list[RegionReader]:
    return [_Joined(parts, dim)]


def _stack(parts: Sequence[Tensor], dim: int = 0) -> list[RegionReader]:
    shape, place = parts[0].shape, dim % (parts[0].dim() + 1)
    rows = [RegionTensor(_Unsqueezed(part, place), (*shape[:place], 1, *shape[place:]), part.dtype) for part in parts]
    return [_Joined(rows, place)]


def _split_with_sizes(base: Tensor, sizes: Sequence[int], dim: int = 0) -> list[RegionReader]:
    return [_Shifted(base, dim, sum(sizes[:i])) for i in range(len(sizes))]


def _split(base: Tensor, size: int, dim: int = 0) -> list[RegionReader]:
    return [_Shifted(base, dim, begin) for begin in range(0, max(base.shape[dim], 1), max(size, 1))]


def _slice(
    base: Tensor, dim: int = 0, begin: int | None = None, end: int | None = None, step: int = 1
) -> list[RegionReader] | None:
    first = begin or 0
    length = base.shape[dim]
    return [_Shifted(base, dim, min(max(first + length if first < 0 else first, 0), length))] if step == 1 else None


def _select(base: Tensor, dim: int, index: int) -> list[RegionReader]:
    return [_Selected(base, dim, index)]


def _unbind(base: Tensor, dim: int = 0) -> list[RegionReader]:
    return [_Selected(base, dim, index) for index in range(base.shape[dim])]


def _unsqueeze(base: Tensor, dim: int) -> list[RegionReader]:
    return [_Unsqueezed(base, dim)]


def _squeeze(base: Tensor, dim: int) -> list[RegionReader]:
    return [_Selected(base, dim, 0) if base.dim() and base.shape[dim] == 1 else _reader(base)]


def _transpose(base: Tensor, first: int, second: int) -> list[RegionReader]:
    dims = list(range(base.dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return [_Permuted(base, dims)]


def _matrix_transpose(base: Tensor) -> list[RegionReader]:
    return _transpose(base, 0, 1) if base.dim() == 2 else [_reader(base)]


def _permute(base: Tensor, dims: Sequence[int]) -> list[RegionReader]:
    return [_Permuted(base, dims)]


def _to_copy(base: Tensor, dtype: torch.dtype | None = None, **_: Any) -> list[RegionReader]:
    return [_reader(base) if dtype in (None, base.dtype) else _Cast(base, dtype or base.dtype)]


_SHAPES: dict[Any, Callable[..., Any]] = {aten.cat.default: _meta_cat, aten.stack.default: _meta_stack}
Rule = Callable[..., "list[RegionReader] | None"]
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh.default), _same),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.transpose.int: _transpose,
    aten.t.default: _matrix_transpose,
    aten.permute.default: _permute,
    aten._to_copy.default: _to_copy,
}
