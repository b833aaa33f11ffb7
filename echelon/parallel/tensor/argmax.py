"""argmax, max and topk of logits split over classes: each rank sends its own candidates instead of its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.distributed.collectives import all_gather
from echelon.parallel.tensor.pointwise_rules import Args, Function, Named, named, rule
from echelon.parallel.tensor.sharded_activation import ShardedActivation
from echelon.parallel.tensor.split_collectives import own


@rule(["argmax"])
def argmax(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["input", "dim", "keepdim"], args, kwargs)
    x, dim = given["input"], given.get("dim")
    if not _chosen_along(x, dim):
        return NotImplemented
    _, indices = _largest(x, 1)
    return indices if given.get("keepdim", False) else indices.squeeze(x.along)


@rule(["max"])
def max_along(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["input", "dim", "keepdim"], args, kwargs)
    x, dim = given["input"], given.get("dim")
    if not _chosen_along(x, dim) or _wants_gradient(x):
        return NotImplemented
    values, indices = _largest(x, 1)
    pair = (values, indices) if given.get("keepdim", False) else (values.squeeze(x.along), indices.squeeze(x.along))
    return torch.return_types.max(pair)


@rule(["topk"])
def topk(name: str, func: Function, args: Args, kwargs: Named) -> Any:
    given = named(["input", "k", "dim", "largest", "sorted"], args, kwargs)
    x, k = given["input"], given["k"]
    fits = _chosen_along(x, given.get("dim", -1)) and given.get("largest", True) and k <= x.shape[x.along]
    if not fits or _wants_gradient(x):
        return NotImplemented
    return torch.return_types.topk(_largest(x, k))


def _chosen_along(x: Any, dim: Any) -> bool:
    return (
        isinstance(x, ShardedActivation) and isinstance(dim, int) and dim % x.dim() == x.along and x.is_floating_point()
    )


def _wants_gradient(x: ShardedActivation) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


@torch.no_grad()
def _largest(x: ShardedActivation, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values along the split dimension and their indices, largest first.

    In spread mode these are for this rank's rows. As in torch, the first of several equal maxima is chosen; for k > 1
    it is not specified which of several equal values are included.
    """
    values, indices = _candidates(x, k)
    if x.axis.group is not None:
        # Doubles represent every float and every index exactly, so one message is enough.
        both = all_gather(torch.stack([values.double(), indices.double()]), x.axis.group)
        values, indices = both[:, 0].movedim(0, -2).flatten(-2), both[:, 1].movedim(0, -2).flatten(-2)
    # Ranks hold classes in ascending order, and a stable sort keeps the order of equal values.
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    values, indices = values.gather(-1, order).to(x.dtype), indices.gather(-1, order).long()
    values, indices = values.movedim(-1, x.along), indices.movedim(-1, x.along)
    if x.rows is not None:
        values, indices = own(values, 0, x.rows, x.axis), own(indices, 0, x.rows, x.axis)
    return values, indices


def _candidates(x: ShardedActivation, k: int) -> tuple[Tensor, Tensor]:
    """Return this rank's k largest values and their indices in the last dimension.

    If this rank has fewer than k columns, the values are padded with -inf.
    """
    local = x.local.movedim(x.along, -1)
    missing = max(0, k - local.shape[-1])
    values, indices = _top(local, k - missing)
    indices = indices + sum(x.sizes[: x.axis.rank])
    filler = (*local.shape[:-1], missing)
    values = torch.cat([values, values.new_full(filler, -torch.inf)], -1)
    return values, torch.cat([indices, indices.new_full(filler, sum(x.sizes) - 1)], -1)


def _top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if k == 0:
        return x[..., :0], x[..., :0].long()
    if k == 1:
        indices = x.argmax(-1, keepdim=True)
        return x.gather(-1, indices), indices
    values, indices = x.topk(k, dim=-1)
    return values, indices
