"""Global gradient norm and clipping, for dense and sparse gradients that may be split, staged or sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.distributed.collectives import start_small_sum


class Census:
    """Computes norm and finiteness of the gradients over all ranks, counting every entry once.

    counted: ids of the parameters that this rank counts; default none
    group:   ranks that hold a part of the model; ``None`` if this rank holds all of it
    flags:   ranks whose gradients may differ and that must agree if one is not finite; ``None`` if none differ
    """

    def __init__(
        self,
        counted: Collection[int] = (),
        group: dist.ProcessGroup | None = None,
        flags: dist.ProcessGroup | None = None,
    ) -> None:
        self._counted, self._group, self._flags = set(counted), group, flags

    def norm(self, parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
        """Return the 2-norm over the gradients of the whole model."""
        if self._group is None:
            values = _values(parameters)
            return total_norm(values) if values else torch.zeros(())
        values = _values(p for p in parameters if id(p) in self._counted)
        squares = [norm.double().square().to(device) for norm in torch._foreach_norm(values)] if values else []
        own = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.double, device=device)
        return start_small_sum(own.reshape(1), self._group, "norm of gradients")()[0].sqrt()

    def all_finite(self, finite: bool, device: torch.device) -> bool:
        """Return True if the gradients of every rank are finite."""
        if self._flags is None:  # reduced gradients, and so the result, are the same on all ranks
            return finite
        flag = torch.tensor([0.0 if finite else 1.0], device=device)
        return not float(start_small_sum(flag, self._flags, "search for overflows")())


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all tensors like torch's ``get_total_norm``, without the engine checks patched into it."""
    norms = [norm.to(tensors[0].device) for norm in torch._foreach_norm(list(tensors))]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    census: Census | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; return the norm before scaling."""
    held = [p for p in parameters if p.grad is not None]
    total = (census or Census()).norm(held, device or torch.device("cpu"))
    grads = [p.grad for p in held if p.grad is not None]
    if not grads:
        return total
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula, so that the numbers agree
    dense = [grad for grad in grads if not grad.is_sparse]
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in dense:
        by_place.setdefault((grad.device, grad.dtype), []).append(grad)
    for (place, dtype), same in by_place.items():
        factor = coefficient.to(place, dtype) if coefficient.dtype == torch.double else coefficient.to(place)
        torch._foreach_mul_(same, factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(coefficient.to(grad.device, grad.dtype))
    return total


def _values(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    grads = [p.grad for p in parameters if p.grad is not None]
    return [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
