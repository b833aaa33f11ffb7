"""Collectives along a split axis, for shards of any width, on plain tensors; mappings.py adds autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.base.errors import UsageError
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import all_gather
from echelon.parallel.tensor.split_axis import Sizes, SplitAxis

# torch 2.13 renamed reduce_scatter_tensor to reduce_scatter_single; 2.11 has only the old name.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own(x: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Return this rank's part of ``x`` as a view."""
    return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank])


def split_all_reduce(x: Tensor, axis: SplitAxis) -> Tensor:
    """Return the sum of every rank's ``x``."""
    if axis.group is None or x.numel() == 0:
        return x.detach()
    summed = x.clone(memory_format=torch.contiguous_format)
    with waiting("sum over the split", x.shape, axis.group):
        dist.all_reduce(summed, group=axis.group)
    return summed


def gather(x: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Return every rank's ``x``, concatenated along ``dim``."""
    if axis.group is None:
        return x.detach()
    if x.dtype is torch.bool:  # Gloo does not support booleans
        return gather(x.view(torch.uint8), dim, sizes, axis).view(torch.bool)
    widest = max(sizes)
    if widest == 0 or math.prod(_resized(x, dim, widest)) == 0:  # all ranks agree that there is nothing to send
        return x.new_empty(_resized(x, dim, sum(sizes)))
    rows = all_gather(_widened(x, dim, widest), axis.group, "gather over the split", x.shape)
    if dim == 0 and min(sizes) == widest:
        return rows.flatten(0, 1)
    return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)], dim)


def split_reduce_scatter(x: Tensor, dim: int, sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Return this rank's part along ``dim`` of the sum of every rank's ``x``."""
    if axis.group is None:
        return x.detach()
    if dist.get_backend(axis.group) != "gloo":
        pieces = torch.stack([_widened(piece, dim, max(sizes)) for piece in _pieces(x, dim, sizes)])
        received = torch.empty_like(pieces[0])
        with waiting("sum over the split", x.shape, axis.group):
            _reduce_scatter_single(received.view(-1), pieces.view(-1), group=axis.group)
        return received.narrow(dim, 0, sizes[axis.rank])
    sent = [piece.contiguous() for piece in _pieces(x, dim, sizes)]
    # The parts are added in rank order, and 16-bit sums are rounded once.
    return torch.stack(_hand_out(sent, [sent[axis.rank].shape] * axis.size, axis)).sum(0)


def split_all_to_all(x: Tensor, cut: int, cut_sizes: Sizes, join: int, join_sizes: Sizes, axis: SplitAxis) -> Tensor:
    """Send the parts of ``x`` along ``cut`` to the ranks, and join the received parts along ``join``.

    This turns "all rows, my columns" into "my rows, all columns", or the other way round.
    """
    if axis.group is None:
        return x.detach()
    sent = [piece.contiguous() for piece in _pieces(x, cut, cut_sizes)]
    shapes = [torch.Size(_resized(sent[axis.rank], join, size)) for size in join_sizes]
    return torch.cat(_hand_out(sent, shapes, axis), join)


def gather_rows(
    x: Tensor, axis: SplitAxis, what: str = "split beside replicate: the devices' batches are joined"
) -> Sizes:
    """Return the number of rows (dimension 0) of each rank's tensor.

    Raises UsageError, whose message begins with ``what``, if other dimensions differ.
    """
    if axis.group is None:
        return (x.shape[0],)
    local = torch.tensor([x.dim(), *x.shape, *[0] * (8 - x.dim())], device=x.device)
    shapes = [tuple(row[1 : 1 + row[0]]) for row in all_gather(local, axis.group).tolist()]
    if len({shape[1:] for shape in shapes}) > 1:
        raise UsageError(
            f"{what}, so they may differ in dimension 0 only, got {', '.join(map(str, shapes))}; pad them to one length"
        )
    return tuple(shape[0] for shape in shapes)


def _hand_out(sent: Sequence[Tensor], shapes: Sequence[torch.Size], axis: SplitAxis) -> list[Tensor]:
    """Send each rank its tensor, and return the tensors received from each rank, which have the given shapes."""
    group, me, device = axis.group, axis.rank, sent[0].device
    assert group is not None
    if dist.get_backend(group) != "gloo":
        received = [sent[me].new_empty(shape) for shape in shapes]
        with waiting("exchange over the split", sent[me].shape, group):
            dist.all_to_all(received, list(sent), group=group)
        return received
    sent = [piece.cpu() for piece in sent]  # Gloo sends from host memory only
    received = [sent[me].new_empty(shape) for shape in shapes]
    received[me] = sent[me]
    _send_and_receive(sent, received, group, me)
    return [piece.to(device) for piece in received]


def _send_and_receive(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup, me: int) -> None:
    """Exchange tensors by point-to-point messages, because Gloo's all-to-all uses a link in one direction at a time.

    Gloo has no reduce-scatter either. Receives are posted first, and each rank begins with its neighbor, as in
    distributed/collectives.py.
    """
    ranks = len(sent)
    works = []
    for away in range(1, ranks):
        source = (me - away) % ranks
        if received[source].numel():
            works.append(dist.irecv(received[source], src=dist.get_global_rank(group, source), group=group))
    for away in range(1, ranks):
        target = (me + away) % ranks
        if sent[target].numel():
            works.append(dist.isend(sent[target], dst=dist.get_global_rank(group, target), group=group))
    with waiting("exchange over the split", sent[me].shape, group):
        for work in works:
            assert work is not None
            work.wait()


def _pieces(x: Tensor, dim: int, sizes: Sizes) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(x, list(sizes), dim)


def _widened(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x.contiguous()
    wide = x.new_zeros(_resized(x, dim, size))
    wide.narrow(dim, 0, x.shape[dim]).copy_(x)
    return wide


def _resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :]) if dim >= 0 else _resized(x, dim + x.dim(), size)
