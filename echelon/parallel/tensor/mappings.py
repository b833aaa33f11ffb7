"""Bridges between whole tensors and their split parts: each a movement forward, and its counterpart backward.

                    shared batch                        spread (each rank its own batch)
enter               as it is      / sum                 gather rows        / reduce-scatter rows
enter a Spread      gather        / reduce-scatter      the same, along the split dimension
leave by sum        sum           / as it is            reduce-scatter rows / gather rows
leave to sequence   reduce-scatter / gather             -
gather              gather        / own part            all-to-all         / all-to-all
slice               own part      / gather              all-to-all         / all-to-all

In shared mode whole tensors are equal on all ranks, and so are their gradients; that is why the gradient of a gathered
tensor is cut and not summed.
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
    """A linear movement of data. Saves no tensors, so a recomputed forward that finds it already made is no different;
    its backward is such a movement again, so second derivatives work."""

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
    return x.detach()  # not a view: what is remembered of x must not keep x alive


def copy_to_split(x: Tensor, axis: SplitAxis) -> tuple[Tensor, Sizes | None]:
    """A plain tensor on its way into a layer that needs all of it, and in spread mode the rows of every rank."""
    x = lower(x)
    if not axis.spread:
        return used_in_parts(x, axis), None
    rows = gather_rows(x, axis)
    axis.memory.rows = rows
    return move_rows(x, rows, axis), rows


def move_rows(x: Tensor, rows: Sizes, axis: SplitAxis) -> Tensor:
    """The rows of every rank; backward, the sum of every rank's gradients for the rows of this one."""
    return move(x, *_there_and_back(gather, split_reduce_scatter, 0, rows, axis))


def used_in_parts(x: Tensor, axis: SplitAxis) -> Tensor:
    """A plain tensor that is equal on all ranks, of which each uses all for its part: gradients are added up."""
    return move(x, _same, partial(split_all_reduce, axis=axis))


def enter_split(local: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """The parts of all ranks, on their way into a layer that needs the whole of them: a gather and an entrance in one,
    whose backward is a reduce-scatter where apart they would cost a sum."""
    return move(lower(local), *_there_and_back(gather, split_reduce_scatter, dim, sizes, axis))


def reduce_from_split(local: Tensor, rows: Sizes | None, axis: SplitAxis) -> Tensor:
    """Every rank holds an addend of the result; the result, in spread mode of this rank's rows only."""
    if rows is None:
        return move(local, partial(split_all_reduce, axis=axis), _same)
    return move(local, *_there_and_back(split_reduce_scatter, gather, 0, rows, axis))


def reduce_scatter_to_split(local: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Every rank holds an addend; this rank's part of the result along ``dim``."""
    return move(local, *_there_and_back(split_reduce_scatter, gather, dim, sizes, axis))


def gather_from_split(local: Tensor, dim: int, sizes: Sizes, rows: Sizes | None, axis: SplitAxis) -> Tensor:
    """The whole, in spread mode of this rank's rows."""
    if rows is None:
        return move(local, *_there_and_back(gather, _own_copy, dim, sizes, axis))
    return move(local, *_rows_for_parts(dim, sizes, rows, axis))


def scatter_to_split(x: Tensor, dim: int, sizes: Sizes, rows: Sizes | None, axis: SplitAxis) -> Tensor:
    """Return this rank's part of a whole, in spread mode for all ranks' rows. Backward is ``gather_from_split``."""
    if rows is None:
        return move(x, *_there_and_back(_own_copy, gather, dim, sizes, axis))
    back, there = _rows_for_parts(dim, sizes, rows, axis)
    return move(x, there, back)


def own_rows(values: Tensor, rows: Sizes, axis: SplitAxis) -> Tensor:
    """Of values that every rank computed for all rows, those of its own rows; all gradients come together again."""
    return move(values, *_there_and_back(_own_copy, gather, 0, rows, axis))


def _own_copy(x: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """A copy, because what is done in place to the part must not reach the whole."""
    return own(x, dim, sizes, axis).clone(memory_format=torch.contiguous_format)


def lower(x: Tensor) -> Tensor:
    """What autocast would do inside the layer, done before the tensor travels: half the bytes."""
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
