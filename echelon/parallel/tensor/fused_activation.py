"""FusedActivation: the output of a fused projection, such as query, key and value in one, each split by itself.

Code that takes the parts apart where they were joined receives a ShardedActivation for each: by ``split``, ``chunk``,
slices, or a reshape into parts x heads. Anything else gathers the whole.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.base.errors import UsageError
from echelon.parallel.tensor.lazy_activation import LazyActivation, Rule
from echelon.parallel.tensor.pointwise_rules import CASTS, POINTWISE, Args, Function, Named, named
from echelon.parallel.tensor.sharded_activation import ShardedActivation
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis

#: Rules for functions of a FusedActivation.
FUSED_RULES: dict[str, Rule] = {}


class FusedActivation(LazyActivation):
    """Several tensors that one layer computes together, joined along the dimension in which each of them is split.

    local:  this rank's part of each, joined
    along:  the dimension
    packs:  for each tensor, the sizes of all ranks' parts
    """

    rules = FUSED_RULES

    def __init__(
        self, local: Tensor, along: int, packs: tuple[Sizes, ...], axis: SplitAxis, rows: Sizes | None = None
    ) -> None:
        super().__init__(local, along, axis, rows)
        self.packs = packs
        self._parts: list[ShardedActivation] | None = None

    def width(self) -> int:
        return sum(map(sum, self.packs))

    def parts(self) -> list[ShardedActivation]:
        """Return the tensors, each split over the ranks."""
        if self._parts is None:
            local = torch.split_with_sizes(self.local, [sizes[self.axis.rank] for sizes in self.packs], self.along)
            self._parts = [
                ShardedActivation(part, self.along, sizes, self.axis, self.rows)
                for part, sizes in zip(local, self.packs, strict=True)
            ]
        return self._parts

    def whole(self) -> Tensor:
        return torch.cat([part.whole() for part in self.parts()], self.along)

    def between(self, begin: int, end: int) -> LazyActivation | None:
        """Return entries ``begin`` to ``end`` along the dimension; None if they are not whole parts."""
        bounds = [0, *accumulate(map(sum, self.packs))]
        if begin >= end or begin not in bounds or end not in bounds:
            return None
        first, last = bounds.index(begin), bounds.index(end)
        chosen = self.parts()[first:last]
        if len(chosen) == 1:
            return chosen[0]
        local = torch.cat([part.local for part in chosen], self.along)
        return FusedActivation(local, self.along, self.packs[first:last], self.axis, self.rows)


pytree.register_pytree_node(
    FusedActivation,
    lambda fused: ([fused.local], (fused.along, fused.packs, fused.axis, fused.rows)),
    lambda parts, facts: FusedActivation(next(iter(parts)), *facts),
)


def _pieces(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Take the parts apart by ``split`` or ``chunk``."""
    given = named(["pieces", "dim"], args[1:], kwargs)
    x, dim = args[0], given.get("dim", 0)
    pieces = given.get("pieces", given.get("chunks", given.get("split_size", given.get("split_size_or_sections"))))
    if not isinstance(x, FusedActivation) or not isinstance(dim, int) or dim % x.dim() != x.along:
        return NotImplemented
    bounds = cut_points(name, pieces, x.width())
    found = [x.between(begin, end) for begin, end in pairwise(bounds)]
    return tuple(found) if found and all(part is not None for part in found) else NotImplemented


def cut_points(name: str, pieces: Any, width: int) -> list[int]:
    """Return where ``split`` or ``chunk`` with these arguments cuts a dimension; empty if that is not known."""
    if isinstance(pieces, int) and pieces > 0:
        size = -(-width // pieces) if name == "chunk" else pieces
        return [*range(0, width, size), width]
    if isinstance(pieces, tuple | list) and all(isinstance(size, int) for size in pieces):
        return [0, *accumulate(pieces)]
    return []


def _slice(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Take one part by a slice of the last dimension: ``x[..., :width]``."""
    x, key = args
    found = last_slice(key, x) if isinstance(x, FusedActivation) and x.along == x.dim() - 1 else None
    part = None if found is None else x.between(*found)
    return NotImplemented if part is None else part


def last_slice(key: Any, x: LazyActivation) -> tuple[int, int] | None:
    """Return begin and end of an index that slices the last dimension alone; None for any other index."""
    keys = key if isinstance(key, tuple) else (key,)
    rest = [each for each in keys[:-1] if each is not Ellipsis and each != slice(None)]
    reaches = keys[0] is Ellipsis or len(keys) == x.dim()
    if rest or not reaches or not isinstance(keys[-1], slice) or keys[-1].step not in (None, 1):
        return None
    begin, end, _ = keys[-1].indices(x.shape[-1])
    return begin, end


def _into_heads(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Reshape equal parts into ``..., parts, heads, width``, which is split by heads."""
    x, *wanted = args
    if len(wanted) == 1 and isinstance(wanted[0], tuple | list):
        wanted = list(wanted[0])
    if not isinstance(x, FusedActivation) or x.rows is not None or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    if -1 in wanted:
        wanted[wanted.index(-1)] = x.numel() // -math.prod(wanted)
    dim, lead = x.along, list(x.shape[: x.along])
    if len(wanted) < dim + 2 or wanted[:dim] != lead or wanted[dim] != len(x.packs) or len(set(x.packs)) > 1:
        return NotImplemented
    sizes, heads, width = x.packs[0], wanted[dim + 1], sum(x.packs[0])
    if not width or any(size * heads % width for size in sizes):
        return NotImplemented
    counts = tuple(size * heads // width for size in sizes)
    shape = [*wanted[: dim + 1], counts[x.axis.rank], *wanted[dim + 2 :]]
    return ShardedActivation(x.local.reshape(shape), dim + 1, counts, x.axis)


def _each(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Compute a function of each entry on the parts as they are."""
    x, *rest = args
    others = pytree.tree_leaves((rest, kwargs), is_leaf=lambda leaf: isinstance(leaf, LazyActivation))
    if not isinstance(x, FusedActivation) or any(isinstance(each, Tensor | LazyActivation) for each in others):
        return NotImplemented
    return FusedActivation(func(x.local, *rest, **kwargs), x.along, x.packs, x.axis, x.rows)


def _refuse_in_place(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    if isinstance(args[0], FusedActivation):  # the change would reach a gathered copy only
        raise UsageError(
            f"split: {name}() changes the output of a fused layer in place; write x = x.{name[:-1]}(...), or leave the "
            "layer whole"
        )
    return NotImplemented


FUSED_RULES |= {
    **dict.fromkeys([*POINTWISE, *CASTS], _each),
    **dict.fromkeys([f"{name}_" for name in POINTWISE if not name.startswith("_")], _refuse_in_place),
    **dict.fromkeys(["split", "split_with_sizes", "chunk"], _pieces),
    "__getitem__": _slice,
    **dict.fromkeys(["view", "reshape"], _into_heads),
}
