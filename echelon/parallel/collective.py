"""The few collectives we use, under one name for every torch we support, and typed messages between ranks.

Nothing here unpickles: what ranks tell each other is tensors, or JSON.
"""

from __future__ import annotations

import json
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


def gather_json(message: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``message``, in rank order, on every rank."""
    data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([data.numel()]), group).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = all_gather(padded, group)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
