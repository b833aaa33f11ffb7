"""Rules for concatenation along dimensions other than the split one, as rotary embeddings and key caches do it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from echelon.parallel.tensor.lazy_activation import LazyActivation
from echelon.parallel.tensor.mappings import scatter_to_split
from echelon.parallel.tensor.pointwise_rules import Args, Function, Named, named, rule
from echelon.parallel.tensor.sharded_activation import ShardedActivation


@rule(["cat", "concat", "concatenate", "stack"])
def concatenate(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["tensors", "dim"], args, kwargs)
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(tensors, tuple | list) or not isinstance(dim, int):
        return NotImplemented
    if name != "stack":  # torch skips such tensors too; an empty key cache begins as one
        tensors = [each for each in tensors if tuple(each.shape) != (0,)]
    lead = next((each for each in tensors if isinstance(each, ShardedActivation)), None)
    if lead is None:
        return NotImplemented
    dim %= lead.dim() + (name == "stack")
    if (name != "stack" and dim == lead.along) or (lead.rows is not None and dim == 0):
        return NotImplemented
    parts = [_part_beside(each, lead) for each in tensors]
    if any(part is None for part in parts):
        return NotImplemented
    return lead.like(func(parts, dim), lead.along + (name == "stack" and dim <= lead.along))


def _part_beside(each: Any, lead: ShardedActivation) -> Tensor | None:
    """Return this rank's part of a tensor that is concatenated with ``lead``; None if it has none."""
    if each.dim() != lead.dim() or each.shape[lead.along] != lead.shape[lead.along]:
        return None
    if isinstance(each, ShardedActivation):
        if each.cut_like(lead):
            return each.local
        each = each.whole()
    elif isinstance(each, LazyActivation):
        each = each.whole()
    return None if lead.rows is not None else scatter_to_split(each, lead.along, lead.sizes, None, lead.axis)
