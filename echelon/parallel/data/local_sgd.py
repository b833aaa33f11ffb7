"""LocalSGD: every rank steps alone, and now and then all replicas become their average.

At a sync each rank sends how far it has come since the last one, and all continue from the mean of that:
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
    """Counts the steps that ranks take alone and brings the replicas together when it is time."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        scaler: LossScaler,
        group: dist.ProcessGroup,
    ) -> None:
        assert plan.local is not None
        self._settings: LocalSgd | AdaptiveLocalSgd = plan.local
        self._outer = plan.local.outer if isinstance(plan.local.outer, Outer) else None
        self._model, self._optimizers, self._scaler, self._group = model, optimizers, scaler, group
        self._ranks, self._device = dist.get_world_size(group), next(model.parameters()).device
        named = dict(model.named_parameters())
        self._drifts = [
            WeightDelta(bucket.parameters, [named[name] for name in bucket.parameters], plan.wire, group, number)
            for number, bucket in enumerate(plan.buckets)
        ]
        self._velocities = [drift.empty() for drift in self._drifts] if self._outer else []
        adaptive = isinstance(plan.local, AdaptiveLocalSgd)
        self.k = plan.local.init_k_steps if isinstance(plan.local, AdaptiveLocalSgd) else plan.local.k_steps
        self.since = 0  #: steps since the last sync
        self._first: float | None = None  # loss of the first step: this rank's own, and after a sync everyone's mean
        self._first_rate = 0.0
        self._agreed = not adaptive
        self.before_meeting: Callable[[], None] = lambda: None  #: called where a step ends in a sync

    def after_step(self, step: int, loss: Tensor, rate: float) -> str | None:
        """Called after each update (``step`` counts from 1). A line to say when k changed."""
        self.since += 1
        adaptive = isinstance(self._settings, AdaptiveLocalSgd)
        if adaptive and self._first is None and math.isfinite(float(loss)):
            self._first, self._first_rate = float(loss), rate
        if self.since < self._apart(step):
            return None
        before = self.k
        self.before_meeting()
        self.meet()
        if adaptive:
            self._adapt(float(loss), rate)
        return None if self.k == before else f"localsgd: k {before} -> {self.k}"

    def next_meeting(self, step: int) -> int:
        """The first step after ``step``, which was the last, after which all meet."""
        return next(at for at in itertools.count(step + 1) if self.since + at - step >= self._apart(at))

    def _apart(self, step: int) -> int:
        """How many steps after the last meeting ``step`` must be to be the next."""
        return self.k if step > self._settings.begin_step else 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """For a while, the model is the average of all replicas; then every rank has its own again."""
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
    def met(self) -> Iterator[None]:
        """For a while, all ranks have the same weights: nothing is averaged to show them."""
        since, self.since = self.since, 0
        try:
            yield
        finally:
            self.since = since

    def tensors(self) -> dict[str, Tensor]:
        """Where the ranks last met, and the outer momentum: the same on every rank."""
        return self._snapshots() | self._outer_momentum()

    def facts(self) -> dict[str, Any]:
        return {
            "k": self.k, "since": self.since, "agreed": self._agreed,
            "first": self._first, "first_rate": self._first_rate,
        }  # fmt: skip

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None) -> None:
        """Go on as saved; without ``facts`` (another number of ranks) from the average that the model now is."""
        self.since = 0
        for drift in self._drifts:
            drift.begin_here()
        mine = self._outer_momentum()
        if facts is not None:
            mine |= self._snapshots()
            self.k, self.since, self._agreed = facts["k"], facts["since"], facts["agreed"]
            self._first, self._first_rate = facts["first"], facts["first_rate"]
        for name, value in mine.items():
            if name in tensors:
                value.copy_(tensors[name].view(value.shape))

    def _snapshots(self) -> dict[str, Tensor]:
        return {f"snapshot.{name}": view for drift in self._drifts for name, view in drift.snapshots().items()}

    def _outer_momentum(self) -> dict[str, Tensor]:
        rows = zip(self._drifts, self._velocities, strict=False)
        return {f"velocity.{name}": view for drift, row in rows for name, view in drift.by_name(row).items()}

    @torch.no_grad()
    def meet(self) -> None:
        """All replicas become their average, the outer optimizer's step taken."""
        self.since = 0
        for index, change in enumerate(self._mean_changes()):
            self._drifts[index].go_on(self._outer_step(index, change))
        average_buffers(self._model)
        if self._settings.average_momentum:
            average([value for o in self._optimizers.values() for s in o.state.values() for value in s.values()])
        self._agree_on_scale()

    def _mean_changes(self) -> Iterator[Tensor]:
        """``mean over ranks of (snapshot - w)``, part by part while the next ones still travel."""
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
            self._scaler.scale = float(smallest)

    def _adapt(self, loss: float, rate: float) -> None:
        """k from the mean loss over the ranks, those aside whose step overflowed."""
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
    """A number and 1, or nothing and 0, so that a sum of such pairs gives a mean over those that are finite."""
    return (number, 1.0) if math.isfinite(number) else (0.0, 0.0)
