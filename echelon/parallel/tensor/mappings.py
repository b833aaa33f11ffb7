"""Differentiable mappings between whole and split tensors: a collective forward, and its counterpart backward.

                         shared batch: forward / backward    spread mode: each rank has its own batch
copy_to_split            identity       / all-reduce         all-gather rows     / reduce-scatter rows
enter_split              all-gather     / reduce-scatter     the same, along the split dimension
reduce_from_split        all-reduce     / identity           reduce-scatter rows / all-gather rows
reduce_scatter_to_split  reduce-scatter / all-gather         -
gather_from_split        all-gather     / own part           all-to-all          / all-to-all
scatter_to_split         own part       / all-gather         all-to-all          / all-to-all

With a shared batch, whole tensors are equal on all ranks, and so are their gradients; that is why the gradient of a
gathered tensor is sliced and not summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.parallel.tensor.split_axis import Sizes, SplitAxis
from echelon.parallel.tensor.split_collectives import (
    gather,
    gather_rows,
    own,
    split_all_reduce,
    split_all_to_all,
    split_reduce_scatter,
)

Movement = Callable[[Tensor], Tensor]


class _Move(Function):
    """A linear mapping by a collective, whose backward is another such mapping, so second derivatives work.

    It saves no tensors, so a recomputed forward may take its result from a cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Movement, back: Movement) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return move(grad, ctx.back, ctx.there), None, None


def move(x: Tensor, there: Movement, back: Movement) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        moved: Tensor = _Move.apply(x, there, back)  # type: ignore[no-untyped-call]
        return moved
    return there(x)


def _same(x: Tensor) -> Tensor:
    return x.detach()  # without a reference to x: SplitInputCache keeps the result, which must not keep x alive


def copy_to_split(x: Tensor, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    """Return a plain tensor as the input of a layer that needs all of it, in spread mode with the rows of every rank.

    The second result is the number of rows of each rank in spread mode, else None.
    """
    x = lower(x)
    if not axis.batch_per_rank:
        return used_in_parts(x, axis), None
    rows = gather_rows(x, axis)
    axis.memory.rows = rows
    return move_rows(x, rows, axis), rows


def move_rows(x: Tensor, rows: Sizes, axis: SplitAxis) -> Tensor:
    """All-gather the rows of every rank; backward reduce-scatters their gradients."""
    return move(x, *_there_and_back(gather, split_reduce_scatter, 0, rows, axis))


def used_in_parts(x: Tensor, axis: SplitAxis) -> Tensor:
    """Return ``x``, which is equal on all ranks, for use with each rank's shard; backward all-reduces its gradients."""
    return move(x, _same, partial(split_all_reduce, axis=axis))


def enter_split(local: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """All-gather the parts of all ranks as the input of a layer that needs the whole tensor.

    Backward is one reduce-scatter; ``gather_from_split`` and ``copy_to_split`` in turn would need an all-reduce.
    """
    return move(lower(local), *_there_and_back(gather, split_reduce_scatter, dim, sizes, axis))


def reduce_from_split(local: Tensor, rows: Sizes | None, axis: SplitAxis) -> Tensor:
    """Sum the partial results of all ranks; in spread mode, return only this rank's rows."""
    if rows is None:
        return move(local, partial(split_all_reduce, axis=axis), _same)
    return move(local, *_there_and_back(split_reduce_scatter, gather, 0, rows, axis))


def reduce_scatter_to_split(local: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Sum the partial results of all ranks, and return this rank's part along ``dim``."""
    return move(local, *_there_and_back(split_reduce_scatter, gather, dim, sizes, axis))


def gather_from_split(local: Tensor, dim: int, sizes: Sizes, rows: Sizes | None, axis: SplitAxis) -> Tensor:
    """Return the whole tensor; in spread mode, only this rank's rows of it."""
    if rows is None:
        return move(local, *_there_and_back(gather, _own_copy, dim, sizes, axis))
    return move(local, *_rows_for_parts(dim, sizes, rows, axis))


def scatter_to_split(x: Tensor, dim: int, sizes: Sizes, rows: Sizes | None, axis: SplitAxis) -> Tensor:
    """Return this rank's part of a whole tensor, in spread mode for all ranks' rows.

    Backward is the forward of ``gather_from_split``.
    """
    if rows is None:
        return move(x, *_there_and_back(_own_copy, gather, dim, sizes, axis))
    back, there = _rows_for_parts(dim, sizes, rows, axis)
    return move(x, there, back)


def own_rows(values: Tensor, rows: Sizes, axis: SplitAxis) -> Tensor:
    """Return this rank's rows of values that every rank computed for all rows; backward all-gathers the gradients."""
    return move(values, *_there_and_back(_own_copy, gather, 0, rows, axis))


def _own_copy(x: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Return a copy of this rank's part, because in-place changes of the part must not reach the whole tensor."""
    return own(x, dim, sizes, axis).clone(memory_format=torch.contiguous_format)


def lower(x: Tensor) -> Tensor:
    """Cast ``x`` to the autocast dtype before it is sent, as autocast would inside the layer: half the bytes."""
    return x.to(lowered(x))


def lowered(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _there_and_back(
    there: Callable[..., Tensor], back: Callable[..., Tensor], dim: int, sizes: Sizes, axis: SplitAxis
) -> tuple[Movement, Movement]:
    facts: dict[str, Any] = {"dim": dim, "sizes": sizes, "axis": axis}
    return partial(there, **facts), partial(back, **facts)


def _rows_for_parts(dim: int, sizes: Sizes, rows: Sizes, axis: SplitAxis) -> tuple[Movement, Movement]:
    there = partial(split_all_to_all, cut=0, cut_sizes=rows, join=dim, join_sizes=sizes, axis=axis)
    back = partial(split_all_to_all, cut=dim, cut_sizes=sizes, join=0, join_sizes=rows, axis=axis)
    return there, back
