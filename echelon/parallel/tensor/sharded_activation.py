"""ShardedActivation: a tensor that is split over ranks along one dimension, and behaves like the whole tensor.

Split layers return it. Functions that have a rule (see ``RULES``) run on the local part and return a ShardedActivation
again, and the next split layer may use the local part directly. If anything else needs the whole tensor, it is gathered
once. So tensors are gathered only when needed, without any annotation by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.parallel.tensor.mappings import (
    copy_to_split,
    enter_split,
    gather_from_split,
    lower,
    lowered,
    scatter_to_split,
)
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_collectives import gather_rows

Rule = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: Rules by name of a torch function or method, which compute it on parts; a rule returns NotImplemented if it cannot.
RULES: dict[str, Rule] = {}


class ShardedActivation:
    """A tensor that is split over ranks along one dimension.

    local:  this rank's part
    along:  the split dimension
    sizes:  sizes of all ranks' parts along it
    axis:   the ranks that hold the parts
    rows:   number of rows (dimension 0) of each rank in spread mode, else None. In spread mode ``local`` has the rows
            of all ranks, but ``shape`` and ``whole()`` have only this rank's rows.
    """

    def __init__(self, local: Tensor, along: int, sizes: Sizes, axis: SplitAxis, rows: Sizes | None = None) -> None:
        self.local = local
        self.sizes = sizes
        self.axis = axis
        self.rows = rows
        self.along = along % local.dim()
        self._whole: tuple[bool, Tensor] | None = None

    def like(self, local: Tensor, along: int | None = None) -> ShardedActivation:
        """Return another tensor, split in the same way; ``along`` is its split dimension if that has moved."""
        return ShardedActivation(local, self.along if along is None else along, self.sizes, self.axis, self.rows)

    def cut_like(self, other: ShardedActivation) -> bool:
        return (self.dim(), self.along, self.sizes, self.rows) == (other.dim(), other.along, other.sizes, other.rows)

    def whole(self) -> Tensor:
        """Return the whole as a plain tensor, in spread mode of this rank's rows. It is gathered once and cached."""
        grad = torch.is_grad_enabled()
        if self._whole is None or self._whole[0] != grad:
            self._whole = (grad, gather_from_split(self.local, self.along, self.sizes, self.rows, self.axis))
        return self._whole[1]

    def changed(self) -> None:
        """Drop the cached whole tensor after an in-place change of the local part."""
        self._whole = None

    @property
    def has_whole(self) -> bool:
        return self._whole is not None

    # ---- interface of a tensor ----

    @property
    def shape(self) -> torch.Size:
        full = list(self.local.shape)
        full[self.along] = sum(self.sizes)
        if self.rows is not None:
            full[0] = self.rows[self.axis.rank]
        return torch.Size(full)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.local.dim()

    ndimension = dim

    @property
    def ndim(self) -> int:
        return self.local.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    is_cuda = property(lambda self: self.local.is_cuda)
    is_cpu = property(lambda self: self.local.is_cpu)
    is_sparse = is_nested = is_quantized = False

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.whole())

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"ShardedActivation(shape={shape}, along={self.along}, sizes={self.sizes}, local={self.local!r})"

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not defined here. Copying and pickling look up dunder names, which
        # must not be taken from Tensor.
        known = getattr(Tensor, name, None) if not name.startswith("__") or name == "__array__" else None
        if known is None:
            raise AttributeError(f"ShardedActivation has no attribute '{name}'")
        return _method(known).__get__(self) if callable(known) else getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rule = RULES.get(name)
        if rule is not None and kwargs.get("out") is None:
            result = rule(name, func, args, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = whole((args, kwargs))
        return func(*args, **kwargs)


def _method(function: Callable[..., Any]) -> Any:
    def method(self: ShardedActivation, *args: Any, **kwargs: Any) -> Any:
        return ShardedActivation.__torch_function__(function, (ShardedActivation,), (self, *args), kwargs)

    return method


#: Operators that Python looks up on the class. In-place operators are left out on purpose, so that ``h += x`` means
#: ``h = h + x``.
OPERATORS = [
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "and", "or", "xor", "invert", "neg", "pos", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "bool", "float", "int", "index", "contains"),
]
for _name in OPERATORS:
    setattr(ShardedActivation, f"__{_name}__", _method(getattr(Tensor, f"__{_name}__")))


def whole(tree: Any) -> Any:
    """Return ``tree`` with every ShardedActivation in it gathered."""
    if isinstance(tree, Tensor):
        return tree
    return pytree.tree_map(
        lambda leaf: leaf.whole() if isinstance(leaf, ShardedActivation) else leaf,
        tree,
        is_leaf=lambda x: isinstance(x, ShardedActivation),
    )


# It is a pytree node, so that code that looks for tensors (such as recomputation) finds the local part.
pytree.register_pytree_node(
    ShardedActivation,
    lambda spread: ([spread.local], (spread.along, spread.sizes, spread.axis, spread.rows)),
    lambda parts, facts: ShardedActivation(next(iter(parts)), *facts),
)


# ---- inputs of split layers ----


def take_in(x: Any, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    """Return all of ``x``, a tensor or ShardedActivation, as the input of a layer split by outputs, and the rows.

    In spread mode the tensor has the rows of all ranks, and the second result has their numbers; else it is None.
    Consecutive layers with the same input share one result, see SplitInputCache.
    """
    if isinstance(x, ShardedActivation) and x.has_whole and not axis.batch_per_rank:
        x = x.whole()
    origin = x.local if isinstance(x, ShardedActivation) else x
    facts = (type(x), lowered(origin), x.along if isinstance(x, ShardedActivation) else None)
    found = axis.memory.find(origin, *facts)
    if found is None:
        found = _enter(x, axis)
        axis.memory.keep(origin, found, *facts)
    entered: tuple[Tensor, Sizes | None] = found
    return entered


def _enter(x: Any, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    if isinstance(x, ShardedActivation):
        return enter_split(x.local, x.along, x.sizes, axis), x.rows
    return copy_to_split(x, axis)


def take_part(x: Any, along: int, sizes: Sizes, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    """Return this rank's part of ``x`` along a dimension as the input of a layer split by inputs, and the rows."""
    along %= x.dim()
    if isinstance(x, ShardedActivation):
        if (x.along, x.sizes) == (along, sizes):
            return x.local, x.rows
        x = x.whole()
    rows = gather_rows(x, axis) if axis.batch_per_rank else None
    return scatter_to_split(lower(x), along, sizes, rows, axis), rows


def slice_up(x: Any, along: int, axis: SplitAxis, weights: tuple[float, ...] | None = None) -> ShardedActivation:
    """Return ``x`` as a ShardedActivation along a dimension; unchanged if it already is one."""
    if isinstance(x, ShardedActivation) and x.along == along:
        return x
    x = whole(x)
    sizes = axis.sizes(x.shape[along], weights)
    return ShardedActivation(scatter_to_split(x, along, sizes, None, axis), along, sizes, axis)
