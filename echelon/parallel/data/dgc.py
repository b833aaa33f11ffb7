"""Deep gradient compression: momentum SGD that sends only the largest entries of large gradients.

Lin et al., "Deep Gradient Compression", ICLR 2018. Every rank adds its gradient to its own momentum and residual,
sends the residual's largest entries, and clears the entries that it has sent. Positions and values of all parameters
are sent in one message. The contributions of all ranks add up to the mean gradient: gradients arrive already weighted
by the rank's share, and weight decay and the momentum taken over from the dense steps are divided among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.sgd import sgd

from echelon.base.errors import UsageError
from echelon.distributed.activity import waiting
from echelon.distributed.collectives import all_gather
from echelon.distributed.process_groups import ProcessGroups
from echelon.distributed.world import World
from echelon.optim.grad_scaler import DTYPES
from echelon.optim.shared_groups import SharingOptimizer, share_groups
from echelon.parallel.clip import total_norm
from echelon.parallel.data.compressor import Compressor, apply_sparse, schedule_sparsity
from echelon.plan import Plan


@dataclass(frozen=True)
class DgcGroups:
    """The process groups in which a rank exchanges sparse gradients.

    parts:  number of contributions: ranks, or hosts if gradients are reduced densely within a host
    across: group of the exchanging ranks; None for a rank that only receives, or for a single part
    within: group of this host's ranks, of which ``leader`` exchanges; None (default) if every rank exchanges
    """

    parts: int
    across: dist.ProcessGroup | None
    within: dist.ProcessGroup | None = None
    leader: int = 0

    @property
    def leads(self) -> bool:
        return self.within is None or dist.get_rank() == self.leader


def make_dgc_groups(plan: Plan, world: World, groups: ProcessGroups) -> DgcGroups:
    """Create the process groups of a plan; every rank creates all of them, in the same order."""
    if world.size == 1:
        return DgcGroups(1, None)
    if plan.ranks_per_host == 1:
        return DgcGroups(world.size, groups.new())
    hosts = [range(first, first + plan.ranks_per_host) for first in range(0, world.size, plan.ranks_per_host)]
    within = [groups.new(host) for host in hosts]
    across = groups.new([host[0] for host in hosts])
    local = world.rank // plan.ranks_per_host
    leads = world.rank == hosts[local][0]
    return DgcGroups(len(hosts), across if leads and len(hosts) > 1 else None, within[local], hosts[local][0])


class SparseMomentum(SharingOptimizer):
    """Replaces the user's SGD and shares its parameter groups, so that LR schedulers of the SGD apply to both."""

    def __init__(
        self, source: torch.optim.Optimizer, plan: Plan, key: str, named: Mapping[str, nn.Parameter], peers: DgcGroups
    ) -> None:
        _refuse_others(source)
        super().__init__(source.param_groups, source.defaults)
        share_groups(self, source)
        assert plan.dgc is not None
        self._settings, self._peers = plan.dgc, peers
        self._clip, self._wire = plan.clip, DTYPES[plan.comm_dtype] if plan.comm_dtype else None
        self.names = [name for b in plan.buckets if b.optimizer == key and b.compressed for name in b.parameters]
        self._compressed = [named[name] for name in self.names]
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        device = self._compressed[0].device if self._compressed else torch.device("cpu")
        self.residual = Compressor(self.names, [p.numel() for p in self._compressed], device)
        self._received: tuple[list[int], Tensor, Tensor] | None = None  # counts; positions and values, one row per part

    @property
    def leads(self) -> bool:
        """True if this rank has its own residual."""
        return self._peers.leads

    def sparsity(self, step: int) -> float | None:
        """Return the share of entries not sent at this step (counted from 0); None while all gradients are dense."""
        s = self._settings
        result = schedule_sparsity(step, s.rampup_begin_step, s.rampup_step, s.sparsity)
        return result if self._compressed else None

    @torch.no_grad()
    def exchange(self, sparsity: float, magnify: Tensor | float) -> None:
        """Accumulate the local gradients and exchange the largest entries.

        magnify: factor that turns this rank's gradient, a part of the global mean, into the mean over its own samples
        """
        packed = None
        self._take_over_momentum()
        if self._peers.leads:
            self._accumulate(self._clip_factor(magnify))
            packed = _pack(*self.residual.select(sparsity, self._wire))
        self._received = self._unpack(self._gathered(packed, sparsity), sparsity)
        for parameter in self._compressed:
            parameter.grad = None  # it is part of the residual now; the update is sparse

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply plain SGD with the received entries, and momentum SGD to parameters with dense gradients."""
        for group in self.param_groups:
            self._dense_step(group, [p for p in group["params"] if p.grad is not None])
        if self._received is not None:
            rates = [-float(self._group_of[id(p)]["lr"]) for p in self._compressed]
            counts, positions, values = self._received
            apply_sparse(self._compressed, self.residual.offsets, counts, positions, values, rates)
            self._received = None

    def _accumulate(self, factor: Tensor | float) -> None:
        for index, parameter in enumerate(self._compressed):
            group = self._group_of[id(parameter)]
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if isinstance(factor, Tensor) or factor != 1.0:
                grad = grad * factor
            if group["weight_decay"] and parameter.grad is not None:
                grad = grad.add(parameter, alpha=group["weight_decay"] / self._peers.parts)
            self.residual.accumulate(index, grad, group["momentum"], group["nesterov"])

    def _take_over_momentum(self) -> None:
        """Move the momentum of the dense steps into the residuals; each contributor takes an equal part."""
        for name, parameter in zip(self.names, self._compressed, strict=True):
            velocity = self.state.pop(parameter, {}).get("momentum_buffer")
            if velocity is not None and self._peers.leads:
                part = (velocity.float() / self._peers.parts).reshape(-1)
                self.residual.add(name, part, torch.zeros_like(part))

    def _clip_factor(self, magnify: Tensor | float) -> Tensor | float:
        """Return the clip factor: each contributor clips its own mean gradient, at clip / sqrt(contributors).

        DGC clips before it accumulates.
        """
        grads = [p.grad for p in self._compressed if p.grad is not None]
        if self._clip is None or not grads:
            return 1.0
        within = 1 if self._peers.within is None else dist.get_world_size(self._peers.within)
        norm = total_norm(grads) * magnify / within
        limit = self._clip * self._peers.parts**-0.5
        return torch.clamp(limit / (norm + 1e-6), max=1.0)

    def _gathered(self, packed: Tensor | None, sparsity: float) -> Tensor:
        rows = None
        if packed is not None:
            rows = packed[None] if self._peers.across is None else all_gather(packed, self._peers.across)
        if self._peers.within is not None:
            if rows is None:
                words = sum(self._words(sparsity))
                rows = torch.empty((self._peers.parts, words), dtype=torch.int32, device=self._compressed[0].device)
            with waiting("compressed gradients", "", self._peers.within):
                dist.broadcast(rows, src=self._peers.leader, group=self._peers.within)
        assert rows is not None
        return rows

    def _words(self, sparsity: float) -> tuple[int, int]:
        """Return the number of 32-bit words of a message's positions, and of its values."""
        count = self.residual.count(sparsity)
        return count * self.residual.index_dtype.itemsize // 4, (count + 1) // 2 if self._wire else count

    def _unpack(self, rows: Tensor, sparsity: float) -> tuple[list[int], Tensor, Tensor]:
        counts, (split, _) = self.residual.counts(sparsity), self._words(sparsity)
        positions = rows[:, :split].contiguous().view(self.residual.index_dtype)
        values = rows[:, split:].contiguous().view(self._wire or torch.float32)
        return counts, positions, values[:, : sum(counts)]

    def _dense_step(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        buffers: list[Tensor | None] = [self.state[p].get("momentum_buffer") for p in parameters]
        sgd(
            list(parameters),
            [p.grad for p in parameters if p.grad is not None],
            buffers,
            has_sparse_grad=any(p.grad is not None and p.grad.is_sparse for p in parameters),
            foreach=group["foreach"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )
        if group["momentum"]:
            for parameter, buffer in zip(parameters, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer


def _refuse_others(source: torch.optim.Optimizer) -> None:
    if not isinstance(source, torch.optim.SGD):
        raise UsageError(
            f"dgc compresses the momentum of torch.optim.SGD, the optimizer given is {type(source).__name__}; give an "
            "SGD, or use fp16_allreduce"
        )
    for name in ("dampening", "maximize"):
        if any(group[name] for group in source.param_groups):
            raise UsageError(f"dgc does not support SGD({name}=...); leave it out")


def _pack(positions: Tensor, values: Tensor) -> Tensor:
    """Return one message of 32-bit words: all positions, then all values."""
    if values.element_size() == 2 and values.numel() % 2:
        values = torch.cat([values, values.new_zeros(1)])
    return torch.cat([positions.view(torch.int32), values.view(torch.int32)])
