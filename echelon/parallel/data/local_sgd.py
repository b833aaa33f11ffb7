"""LocalSGD: every rank steps alone, and all replicas are averaged every k steps.

At a sync each rank sends its weight change since the last sync, and all ranks continue from the mean change:
``w = snapshot - mean(snapshot - w)``. With an outer optimizer the mean is a gradient for Nesterov momentum (Douillard
et al., "DiLoCo", 2023). The adaptive form follows Wang and Joshi, "Adaptive Communication Strategies" (AdaComm), 2019.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.distributed.activity import waiting
from echelon.distributed.collectives import start_small_sum
from echelon.distributed.replicas import average, average_buffers
from echelon.optim.grad_scaler import LossScaler
from echelon.parallel.data.weight_delta import WeightDelta
from echelon.plan import Plan
from echelon.strategy import AdaptiveLocalSgd, LocalSgd, Outer


class LocalSgdAverager:
    """Counts local steps and averages the replicas when a sync is due.

    before_sync: called before the sync at the end of a step
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        scaler: LossScaler,
        group: dist.ProcessGroup,
        before_sync: Callable[[], None],
    ) -> None:
        assert plan.local is not None
        self._settings: LocalSgd | AdaptiveLocalSgd = plan.local
        self._outer = plan.local.outer if isinstance(plan.local.outer, Outer) else None
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._group = group
        self._ranks, self._device = dist.get_world_size(group), next(model.parameters()).device
        named = dict(model.named_parameters())
        self._drifts = [
            WeightDelta(bucket.parameters, [named[name] for name in bucket.parameters], plan.comm_dtype, group, number)
            for number, bucket in enumerate(plan.buckets)
        ]
        self._velocities = [drift.empty() for drift in self._drifts] if self._outer else []
        adaptive = isinstance(plan.local, AdaptiveLocalSgd)
        self.k = plan.local.init_k_steps if isinstance(plan.local, AdaptiveLocalSgd) else plan.local.k_steps
        self.since = 0  #: steps since the last sync
        self._first: float | None = None  # loss of the first step: this rank's own, after a sync the mean of all ranks
        self._first_rate = 0.0
        self._agreed = not adaptive
        self._before_sync = before_sync

    def after_step(self, step: int, loss: Tensor, rate: float) -> str | None:
        """Sync if it is due after update ``step`` (counted from 1); return a line to log if k changed."""
        self.since += 1
        adaptive = isinstance(self._settings, AdaptiveLocalSgd)
        if adaptive and self._first is None and math.isfinite(float(loss)):
            self._first, self._first_rate = float(loss), rate
        if self.since < self._apart(step):
            return None
        before = self.k
        self._before_sync()
        self.sync()
        if adaptive:
            self._adapt(float(loss), rate)
        return None if self.k == before else f"localsgd: k {before} -> {self.k}"

    def next_sync(self, step: int) -> int:
        """Return the number of the next step that ends with a sync, where ``step`` is the last finished one."""
        return next(at for at in itertools.count(step + 1) if self.since + at - step >= self._apart(at))

    def _apart(self, step: int) -> int:
        """Return the number of steps between syncs that is in force at ``step``."""
        return self.k if step > self._settings.begin_step else 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Set the model to the average of all replicas within the context; restore this rank's weights afterwards."""
        if self.since == 0:
            yield
            return
        kept = [drift.copy() for drift in self._drifts]
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        for drift, change in zip(self._drifts, self._mean_changes(), strict=True):
            drift.show(change)
        average_buffers(self._model)
        try:
            yield
        finally:
            for drift, copied in zip(self._drifts, kept, strict=True):
                drift.put_back(copied)
            with torch.no_grad():
                for name, buffer in self._model.named_buffers():
                    buffer.copy_(buffers[name])

    @contextlib.contextmanager
    def in_sync(self) -> Iterator[None]:
        """Mark all ranks as having equal weights within the context, so that ``averaged`` does nothing."""
        since, self.since = self.since, 0
        try:
            yield
        finally:
            self.since = since

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the last sync and the outer momentum: the same on every rank."""
        return self._snapshots() | self._outer_momentum()

    def facts(self) -> dict[str, Any]:
        return {
            "k": self.k, "since": self.since, "agreed": self._agreed,
            "first": self._first, "first_rate": self._first_rate,
        }  # fmt: skip

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None) -> None:
        """Restore a saved state; without ``facts`` (the number of ranks changed) start from the model's weights."""
        self.since = 0
        for drift in self._drifts:
            drift.begin_here()
        local = self._outer_momentum()
        if facts is not None:
            local |= self._snapshots()
            self.k, self.since, self._agreed = facts["k"], facts["since"], facts["agreed"]
            self._first, self._first_rate = facts["first"], facts["first_rate"]
        for name, value in local.items():
            if name in tensors:
                value.copy_(tensors[name].view(value.shape))

    def _snapshots(self) -> dict[str, Tensor]:
        return {f"snapshot.{name}": view for drift in self._drifts for name, view in drift.snapshots().items()}

    def _outer_momentum(self) -> dict[str, Tensor]:
        rows = zip(self._drifts, self._velocities, strict=False)
        return {f"velocity.{name}": view for drift, row in rows for name, view in drift.by_name(row).items()}

    @torch.no_grad()
    def sync(self) -> None:
        """Set all replicas to their average, or to the result of the outer optimizer's step."""
        self.since = 0
        for index, change in enumerate(self._mean_changes()):
            self._drifts[index].go_on(self._outer_step(index, change))
        average_buffers(self._model)
        if self._settings.average_momentum:
            average([value for o in self._optimizers.values() for s in o.state.values() for value in s.values()])
        self._agree_on_scale()

    def _mean_changes(self) -> Iterator[Tensor]:
        """Yield the mean over ranks of ``snapshot - w`` bucket by bucket, while later buckets are still being sent."""
        for drift in self._drifts:
            drift.start()
        for drift in self._drifts:
            drift.turn()
        return (drift.mean() for drift in self._drifts)

    def _outer_step(self, index: int, change: Tensor) -> Tensor:
        if self._outer is None:
            return change
        velocity = self._velocities[index]
        velocity.mul_(self._outer.momentum).add_(change)
        return change.add(velocity, alpha=self._outer.momentum).mul_(self._outer.lr)

    def _agree_on_scale(self) -> None:
        if self._scaler.active:
            smallest = torch.tensor([self._scaler.scale], dtype=torch.double, device=self._device)
            with waiting("loss scale", "", self._group):
                dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
            self._scaler.lower_to(float(smallest))

    def _adapt(self, loss: float, rate: float) -> None:
        """Set k from the mean loss over the ranks whose loss is finite."""
        settings = self._settings
        assert isinstance(settings, AdaptiveLocalSgd)
        own = [*_counted(loss), rate, *_counted(self._first if self._first is not None else math.nan)]
        sums = start_small_sum(torch.tensor(own, dtype=torch.double, device=self._device), self._group)()
        total, finite, rates, first, begun = sums.tolist()
        rate = rates / self._ranks
        if not self._agreed and begun:  # until now every rank knew only its own first loss
            self._first, self._first_rate, self._agreed = first / begun, self._first_rate or rate, True
        if not finite or not self._first or not rate:
            return
        ratio = self._first_rate * total / finite / (rate * self._first)
        inside, outside = (1, settings.init_k_steps) if settings.rule == "adacomm" else (settings.init_k_steps, 1)
        self.k = min(max(math.ceil(math.sqrt(max(ratio * inside, 0.0)) * outside), 1), settings.max_k_steps)


def _counted(number: float) -> tuple[float, float]:
    """Return (number, 1), or (0, 0) if it is not finite: sums of such pairs give the mean of the finite numbers."""
    return (number, 1.0) if math.isfinite(number) else (0.0, 0.0)
