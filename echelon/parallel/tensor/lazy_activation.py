"""LazyActivation: base of activations that ranks hold in parts, and that behave like the whole tensor.

A function that has a rule (see ``rules``) runs on the local part. Any other function receives the whole tensor, which
is gathered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.parallel.tensor.split_axis import Sizes, SplitAxis

Rule = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class LazyActivation:
    """A tensor of which this rank holds a part.

    local:  this rank's part
    along:  the split dimension
    axis:   the ranks that hold the parts
    rows:   number of rows (dimension 0) of each rank in spread mode, else None. In spread mode ``local`` has the rows
            of all ranks, but ``shape`` and ``whole()`` have only this rank's rows.
    """

    #: Rules by name of a torch function or method, which compute it on parts; a rule returns NotImplemented if it
    #: cannot.
    rules: ClassVar[dict[str, Rule]]

    def __init__(self, local: Tensor, along: int, axis: SplitAxis, rows: Sizes | None) -> None:
        self.local = local
        self.axis = axis
        self.rows = rows
        self.along = along % local.dim()

    def whole(self) -> Tensor:
        """Return the whole as a plain tensor, in spread mode of this rank's rows. It is gathered once and cached."""
        raise NotImplementedError

    def width(self) -> int:
        """Return the size of the whole along the split dimension."""
        raise NotImplementedError

    # ---- interface of a tensor ----

    @property
    def shape(self) -> torch.Size:
        full = list(self.local.shape)
        full[self.along] = self.width()
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

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not defined here. Copying and pickling look up dunder names, which
        # must not be taken from Tensor.
        known = getattr(Tensor, name, None) if not name.startswith("__") or name == "__array__" else None
        if known is None:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return _method(known).__get__(self) if callable(known) else getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rule = cls.rules.get(name)
        if rule is not None and kwargs.get("out") is None:
            result = rule(name, func, args, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = whole((args, kwargs))
        return func(*args, **kwargs)


def _method(function: Callable[..., Any]) -> Any:
    def method(self: LazyActivation, *args: Any, **kwargs: Any) -> Any:
        return type(self).__torch_function__(function, (type(self),), (self, *args), kwargs)

    return method


#: Operators that Python looks up on the class. In-place operators are left out on purpose, so that ``h += x`` means
#: ``h = h + x``.
OPERATORS = [
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "and", "or", "xor", "invert", "neg", "pos", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "bool", "float", "int", "index", "contains"),
]
for _name in OPERATORS:
    setattr(LazyActivation, f"__{_name}__", _method(getattr(Tensor, f"__{_name}__")))


def whole(tree: Any) -> Any:
    """Return ``tree`` with every LazyActivation in it gathered."""
    if isinstance(tree, Tensor):
        return tree
    return pytree.tree_map(
        lambda leaf: leaf.whole() if isinstance(leaf, LazyActivation) else leaf,
        tree,
        is_leaf=lambda x: isinstance(x, LazyActivation),
    )
