"""ShardedActivation: a tensor that is split over ranks along one dimension, and behaves like the whole tensor.

Split layers return it. Functions that have a rule (see ``RULES``) run on the local part and return a ShardedActivation
again, and the next split layer may use the local part directly. If anything else needs the whole tensor, it is gathered
once. So tensors are gathered only when needed, without any annotation by the user.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.parallel.tensor.lazy_activation import LazyActivation, Rule, whole
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

#: Rules for functions of a ShardedActivation.
RULES: dict[str, Rule] = {}


class ShardedActivation(LazyActivation):
    """A tensor that is split over ranks along one dimension.

    local:  this rank's part
    along:  the split dimension
    sizes:  sizes of all ranks' parts along it
    axis:   the ranks that hold the parts
    rows:   number of rows (dimension 0) of each rank in spread mode, else None. In spread mode ``local`` has the rows
            of all ranks, but ``shape`` and ``whole()`` have only this rank's rows.
    """

    rules = RULES

    def __init__(self, local: Tensor, along: int, sizes: Sizes, axis: SplitAxis, rows: Sizes | None = None) -> None:
        super().__init__(local, along, axis, rows)
        self.sizes = sizes
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

    def width(self) -> int:
        return sum(self.sizes)

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"ShardedActivation(shape={shape}, along={self.along}, sizes={self.sizes}, local={self.local!r})"


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
    x = _sharded_or_whole(x)
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


def _sharded_or_whole(x: Any) -> Any:
    """Return ``x`` with parts that no split layer uses as they are, those of a fused projection, gathered."""
    return x.whole() if isinstance(x, LazyActivation) and not isinstance(x, ShardedActivation) else x


def _enter(x: Any, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    if isinstance(x, ShardedActivation):
        return enter_split(x.local, x.along, x.sizes, axis), x.rows
    return copy_to_split(x, axis)


def take_part(x: Any, along: int, sizes: Sizes, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    """Return this rank's part of ``x`` along a dimension as the input of a layer split by inputs, and the rows."""
    x = _sharded_or_whole(x)
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
