"""Rules for attention on parts: each rank computes the heads of its queries, with keys split or whole.

Several query heads may share a head of keys (grouped-query attention). If there are fewer key heads than ranks, keys
and values stay whole on every rank, and each rank takes the heads that its queries use.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from echelon.parallel.tensor.lazy_activation import LazyActivation
from echelon.parallel.tensor.mappings import scatter_to_split, used_in_parts
from echelon.parallel.tensor.pointwise_rules import Args, Function, Named, named, rule
from echelon.parallel.tensor.rng import rank_local_rng
from echelon.parallel.tensor.sharded_activation import ShardedActivation


@rule(["matmul", "__matmul__", "bmm"])
def product(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Multiply batches of matrices split along a batch dimension, such as the heads of attention."""
    a, b = (*args, None)[:2]
    lead = a if isinstance(a, ShardedActivation) else b
    if not isinstance(lead, ShardedActivation) or lead.along >= lead.dim() - 2:
        return NotImplemented
    parts = [_batch_part(each, lead) for each in (a, b)]
    return NotImplemented if any(part is None for part in parts) else lead.like(func(*parts))


def _batch_part(each: Any, lead: ShardedActivation) -> Tensor | None:
    """Return this rank's matrices of an operand; None if it is not cut as ``lead`` and cannot be."""
    if isinstance(each, ShardedActivation):
        return each.local if each.cut_like(lead) else None
    if not isinstance(each, Tensor) or lead.rows is not None or each.dim() != lead.dim():
        return None
    if each.shape[: lead.along + 1] != lead.shape[: lead.along + 1]:
        return None
    return scatter_to_split(each, lead.along, lead.sizes, None, lead.axis)


@rule(["scaled_dot_product_attention"])
def attention(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Compute attention for the heads of this rank."""
    given = named(["query", "key", "value", "attn_mask", "dropout_p", "is_causal"], args, kwargs)
    q, k, v = (given.pop(each) for each in ("query", "key", "value"))
    if not isinstance(q, ShardedActivation) or q.dim() != 4 or q.along != 1 or not min(q.sizes):
        return NotImplemented
    keys = [_own_key_heads(x, q) for x in (k, v)]
    mask = given.pop("attn_mask", None)
    if isinstance(mask, ShardedActivation):
        mask = mask.local if mask.cut_like(q) else mask.whole()
    elif mask is not None and mask.dim() > 2:
        mask = _mask_part(mask, q)
    if mask is NotImplemented or any(part is None for part in keys):
        return NotImplemented
    with rank_local_rng(q.axis, q.device, wanted=given.get("dropout_p", 0.0) > 0):
        return q.like(func(q.local, *keys, attn_mask=mask, **given))


def _own_key_heads(x: Any, q: ShardedActivation) -> Tensor | None:
    """Return the heads of keys or values that this rank's queries use; None if they are not at hand."""
    if x.dim() != 4 or not x.shape[1] or q.shape[1] % x.shape[1]:
        return None
    if isinstance(x, ShardedActivation) and x.along == 1 and x.rows == q.rows and _same_heads(x, q):
        return x.local
    if q.rows is not None:
        return None
    whole = x.whole() if isinstance(x, LazyActivation) else x
    heads = whole.repeat_interleave(q.shape[1] // x.shape[1], 1)
    return scatter_to_split(heads, 1, q.sizes, None, q.axis)


@rule(["packed_attention"])
def packed(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    """Compute attention of packed sequences for the heads of this rank.

    In spread mode the rows of other ranks are other sequences, so tensors are gathered instead.
    """
    q, k, v, bounds = args
    if not all(isinstance(x, ShardedActivation) and x.dim() == 3 and x.along == 1 and x.cut_like(q) for x in (q, k, v)):
        return NotImplemented
    if q.rows is not None or not min(q.sizes):
        return NotImplemented
    with rank_local_rng(q.axis, q.device, wanted=kwargs.get("dropout", 0.0) > 0):
        return q.like(func(q.local, k.local, v.local, bounds, **kwargs))


def _same_heads(x: ShardedActivation, q: ShardedActivation) -> bool:
    """Return True if each rank has the heads of ``x`` that its queries need; several queries may share a head."""
    return all(size * q.shape[1] == other * x.shape[1] for size, other in zip(x.sizes, q.sizes, strict=True))


def _mask_part(mask: Tensor, q: ShardedActivation) -> Any:
    if q.rows is not None:
        return NotImplemented
    heads = mask.dim() - 3
    if mask.shape[heads] == 1 != q.shape[1]:
        return used_in_parts(mask, q.axis) if mask.requires_grad else mask
    return scatter_to_split(mask, heads, q.sizes, None, q.axis)
