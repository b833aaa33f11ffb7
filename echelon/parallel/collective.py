"""The few collectives we use, under one name for every torch we support, and typed messages between ranks.

Nothing here unpickles: what ranks tell each other is tensors, or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed all_gather_into_tensor to all_gather_single; 2.11 has only the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(local: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Stack every rank's ``local`` (same shape everywhere) along a new first dimension."""
    out = local.new_empty((dist.get_world_size(group), *local.shape))
    _all_gather_single(out.view(-1), local.contiguous().view(-1), group=group)
    return out


#: Up to so many ranks, a small sum is gathered and added locally: one round of messages where Gloo's all-reduce takes
#: several. Measured for 64 floats on two cores: 0.6 against 1.7 ms on 2 ranks, 3.2 against 5.4 on 4.
FEW = 8


def start_small_sum(local: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin the sum of a small tensor over all ranks; call what is returned to wait for it."""
    if dist.get_world_size(group) > FEW:
        total = local.clone()
        work: dist.Work | None = dist.all_reduce(total, group=group, async_op=True)
        return lambda: _after(work, total)
    parts = local.new_empty((dist.get_world_size(group), *local.shape))
    work = _all_gather_single(parts.view(-1), local.contiguous().view(-1), group=group, async_op=True)
    return lambda: _after(work, parts).sum(0)


def _after(work: dist.Work | None, result: torch.Tensor) -> torch.Tensor:
    assert work is not None
    work.wait()
    return result


def gather_json(message: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``message``, in rank order, on every rank."""
    data = json_to_tensor(message)
    sizes = all_gather(torch.tensor([data.numel()]), group).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = all_gather(padded, group)
    return [tensor_to_json(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def json_to_tensor(message: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def tensor_to_json(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
