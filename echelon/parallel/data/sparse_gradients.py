"""Reduction of row-sparse gradients: only rows that some rank touched are sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.distributed.collectives import all_gather


def reduce_sparse(name: str, parameter: nn.Parameter, group: dist.ProcessGroup) -> Tensor | None:
    """Return the coalesced sum over ranks of ``parameter.grad``; ``None`` if no rank used the parameter."""
    rows, values = _local_rows(name, parameter)
    counts = all_gather(torch.tensor([-1 if rows is None else rows.numel()], device=parameter.device), group)
    sizes = [int(count) for count in counts.flatten().tolist()]
    longest = max(sizes)
    if longest < 0:
        return None
    padded_rows = parameter.new_zeros(longest, dtype=torch.int64)
    padded_values = parameter.new_zeros(longest, *parameter.shape[1:])
    if rows is not None and values is not None:
        padded_rows[: rows.numel()] = rows
        padded_values[: rows.numel()] = values
    all_rows, all_values = all_gather(padded_rows, group), all_gather(padded_values, group)
    rows = torch.cat([row[: max(size, 0)] for row, size in zip(all_rows, sizes, strict=True)])
    values = torch.cat([value[: max(size, 0)] for value, size in zip(all_values, sizes, strict=True)])
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False).coalesce()


def _local_rows(name: str, parameter: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    grad = parameter.grad
    if grad is None:
        return None, None
    if not grad.is_sparse:
        raise UsageError(
            f"'{name}' belongs to an embedding with sparse=True but got a dense gradient (is the weight tied to "
            "another layer?); set sparse=False there"
        )
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
