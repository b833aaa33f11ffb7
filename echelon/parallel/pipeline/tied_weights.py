"""Sum the gradients of parameters that several stages hold: tied weights, and weights used by code between units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.distributed.collectives import all_gather
from echelon.distributed.mesh_groups import MeshGroups
from echelon.plan import Plan

Places = tuple[int, ...]


class TiedWeights:
    """Parameters shared by several ranks along the stage axis; each set of such ranks has its own process group."""

    def __init__(self, plan: Plan, grid: MeshGroups, held: Mapping[str, nn.Parameter]) -> None:
        self._shared: dict[Places, list[nn.Parameter]] = {}
        self._groups: dict[Places, dist.ProcessGroup] = {}
        self._owner: dict[int, str] = {}
        names: dict[Places, list[tuple[str, str]]] = defaultdict(list)
        for bucket in plan.buckets:
            if len(bucket.stages) > 1:
                names[bucket.stages] += [(bucket.optimizer, name) for name in bucket.parameters]
        for places in sorted(names):  # all ranks must create all groups, in the same order
            group = grid.among(places)
            if group is not None:
                self._groups[places] = group
                self._shared[places] = [held[name] for _, name in names[places]]
                self._owner |= {id(held[name]): key for key, name in names[places]}

    @torch.no_grad()
    def add_up(self, optimizers: Collection[str]) -> None:
        """Sum the gradients over all holders. The gradient of a parameter that no stage used is None."""
        for places, parameters in self._shared.items():
            chosen = [p for p in parameters if self._owner[id(p)] in optimizers]
            for same in _by_dtype(chosen):
                _sum(same, self._groups[places])


def _by_dtype(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.dtype].append(parameter)
    return kinds.values()


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients with one all-gather, in rank order, so that they are equal on all holders.

    The message has a flag for each parameter: 1 if it has a gradient on this rank.
    """
    flags = [torch.tensor([0.0 if p.grad is None else 1.0], dtype=p.dtype, device=p.device) for p in parameters]
    rows = [_flat(p) for p in parameters]
    total = all_gather(torch.cat([*rows, *flags]), group).sum(0)
    used = total[-len(parameters) :].tolist()
    at = 0
    for parameter, flag in zip(parameters, used, strict=True):
        end = at + parameter.numel()
        parameter.grad = total[at:end].view(parameter.shape).clone() if flag else None
        at = end


def _flat(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
