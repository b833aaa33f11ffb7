"""``OptimizerUpdate``: clips and applies reduced gradients, here or on servers, and steps the schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError, nearest
from echelon.distributed.world import World
from echelon.engine.consistency import ConsistencyChecker
from echelon.engine.lr_schedules import LRSchedulers
from echelon.parallel.clip import clip_gradients
from echelon.parallel.lr_scaling import scaled_rates
from echelon.parallel.step_guard import StepGuard

if TYPE_CHECKING:
    from echelon.engine.parallelize import ParallelModel
    from echelon.parameter_server.worker.session import ParameterServerSession

Optimizers = Mapping[str, torch.optim.Optimizer]


class OptimizerUpdate:
    """One optimizer update: ``begin``, then ``weights`` if there are gradients to apply, then ``end``.

    given: the user's optimizers, which schedulers drive even if other optimizers take the steps
    guard: context that marks optimizer steps as those of the engine
    """

    def __init__(
        self,
        world: World,
        given: Optimizers,
        schedules: LRSchedulers,
        served: ParameterServerSession | None,
        parts: ParallelModel,
        company: ConsistencyChecker,
        guard: StepGuard,
    ) -> None:
        self._guard = guard
        self._world = world
        self._given = given
        self._schedules = schedules
        self._served = served
        self._optimizers, self._company = parts.optimizers, company
        self._clip, self._census, self._shards = parts.plan.clip, parts.census, parts.shards
        self._gradients, self._scaler, self._local = parts.gradients, parts.scaler, parts.local
        self._owned = _parameter_count(given)

    def chosen(self, name: str | None) -> Optimizers:
        """Return the optimizer of that name, or all of them. Raises ``UsageError`` for an unknown name."""
        if name is None:
            return self._optimizers
        if name not in self._optimizers:
            raise UsageError(f"there is no optimizer '{name}'{nearest(name, self._optimizers)}")
        return {name: self._optimizers[name]}

    def begin(self, optimizers: Optimizers) -> float:
        """Return the learning rate of the update, before schedulers change it and without scaling factors."""
        if self._world.size > 1 and _parameter_count(self._given) != self._owned:  # new ones would not be reduced
            raise UsageError("an optimizer was given more parameters after distribute(); call distribute() again")
        return float(next(iter(optimizers.values())).param_groups[0]["lr"])

    @property
    def empty(self) -> bool:
        """True if there is nothing to apply."""
        return self._gradients.overflowed or self._gradients.empty

    def weights(self, optimizers: Optimizers, factor: float, loss: Tensor) -> None:
        """Apply the gradients of ``loss`` at ``factor`` times the learning rate."""
        served = self._served
        if self._clip is not None:
            clip_gradients(parameters_of(optimizers), self._clip, self._census, self._world.device)
        if served is None or served.steps_here:
            with scaled_rates(optimizers.values(), factor), self._guard:
                for optimizer in optimizers.values():
                    optimizer.step()
        if served is not None:
            with self._company.explained():
                served.update(self._gradients.own_samples, float(self._gradients.weights), loss)
        if self._shards is not None:
            self._shards.after_step(optimizers)
        if self._schedules.all:
            self._schedules.after_update([self._given[key] for key in optimizers])

    def end(self, step: int, loss: Tensor, rate: float) -> Sequence[str]:
        """Drop the gradients, update the loss scale, average under local SGD if due, and return log lines."""
        news = self._scaler.update(finite=not self._gradients.overflowed) if self._scaler.active else None
        self._gradients.applied()
        if self._local is None:
            return () if news is None else (news,)
        with self._company.explained():
            met = self._local.after_step(step, loss, rate)
        return [line for line in (news, met) if line is not None]


def parameters_of(optimizers: Optimizers) -> list[nn.Parameter]:
    return [p for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]]


def _parameter_count(optimizers: Optimizers) -> int:
    return sum(len(group["params"]) for optimizer in optimizers.values() for group in optimizer.param_groups)
