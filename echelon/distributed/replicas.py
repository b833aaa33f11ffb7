"""Makes replicas equal: broadcasts the initial weights, and averages replicas that have diverged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from echelon.distributed.activity import waiting


def broadcast_state(model: nn.Module, without: Container[object] = ()) -> None:
    """Broadcast rank 0's parameters and buffers to every rank.

    without: parameters that have no values yet
    """
    with torch.no_grad():
        for tensors in _by_kind([*(p for p in model.parameters() if p not in without), *model.buffers()]):
            flat = flatten(tensors)
            with waiting("broadcast of the model"):
                dist.broadcast(flat, src=0)
            unflatten_into(flat, tensors)


def average_buffers(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average the model's buffers, such as batch-norm statistics, which differ between replicas."""
    average((buffer for buffer in model.buffers() if not isinstance(buffer, FakeTensor)), group)


@torch.no_grad()
def average(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Average floating-point tensors over replicas, in place; other tensors become those of the first replica."""
    for same in _by_kind(tensors):
        flat = flatten(same)
        with waiting("average of replicas", "", group):
            if flat.is_floating_point():
                dist.all_reduce(flat, group=group)
                flat /= dist.get_world_size(group)
            else:
                dist.broadcast(flat, group=group, group_src=0)
        unflatten_into(flat, same)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of all tensors."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the values of ``flatten``'s result back into ``tensors``."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype, so that a group fits one flat message; a tensor with several names appears once."""
    kinds: dict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.numel():
            kinds[tensor.dtype][id(tensor)] = tensor
    return [list(same.values()) for same in kinds.values()]
