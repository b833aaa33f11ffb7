"""``OptimizerUpdate``: clips and applies reduced gradients, here or on servers, and steps the schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.base.errors import UsageError, nearest
from echelon.engine.run_context import RunContext
from echelon.parallel.clip import clip_gradients
from echelon.parallel.lr_scaling import scaled_rates

if TYPE_CHECKING:
    from echelon.engine.parallelize import ParallelModel

Optimizers = Mapping[str, torch.optim.Optimizer]


@dataclass(slots=True)
class UpdateRecord:
    """One optimizer update.

    samples: samples of all ranks in all accumulated passes; None if their number is unknown
    rate:    learning rate, before schedulers changed it
    norm:    2-norm of all gradients before clipping; None if it was not computed
    """

    loss: Tensor
    samples: Tensor | float | None
    rate: float
    norm: Tensor | None = None


class OptimizerUpdate:
    """One optimizer update: ``begin``, then ``weights`` if there are gradients to apply, then ``end``."""

    def __init__(self, run: RunContext, parts: ParallelModel) -> None:
        self._run, self._parts = run, parts
        self._owned = _parameter_count(run.optimizers)
        self._is_alone = run.world.mesh_size == 1

    def chosen(self, name: str | None) -> Optimizers:
        """Return the optimizer of that name, or all of them. Raises ``UsageError`` for an unknown name."""
        if name is None:
            return self._parts.optimizers
        if name not in self._parts.optimizers:
            raise UsageError(f"there is no optimizer '{name}'{nearest(name, self._parts.optimizers)}")
        return {name: self._parts.optimizers[name]}

    def begin(self, optimizers: Optimizers) -> float:
        """Return the learning rate of the update, before schedulers change it and without scaling factors."""
        if not self._is_alone and _parameter_count(self._run.optimizers) != self._owned:  # new ones are not reduced
            raise UsageError("an optimizer was given more parameters after distribute(); call distribute() again")
        return float(next(iter(optimizers.values())).param_groups[0]["lr"])

    @property
    def empty(self) -> bool:
        """True if there is nothing to apply."""
        gradients = self._parts.gradients
        return gradients.overflowed or gradients.empty

    def weights(self, optimizers: Optimizers, factor: float, loss: Tensor) -> Tensor | None:
        """Apply the gradients of ``loss`` at ``factor`` times the learning rate; return their norm if it is known."""
        run, parts, norm = self._run, self._parts, None
        if parts.plan.clip is not None:
            norm = clip_gradients(parameters_of(optimizers), parts.plan.clip, parts.census, run.world.device)
        elif run.metrics.norm_due(run.progress.steps + 1):
            norm = parts.census.norm(parameters_of(optimizers), run.world.device)
        if run.backend.steps_here:
            with scaled_rates(optimizers.values(), factor), run.guard:
                for optimizer in optimizers.values():
                    optimizer.step()
        run.backend.push(parts.gradients, loss)
        if parts.shards is not None:
            parts.shards.after_step(optimizers)
        if run.schedules.all:
            run.schedules.after_update([run.optimizers[key] for key in optimizers])
        return norm

    def end(self, step: int, loss: Tensor, rate: float) -> Sequence[str]:
        """Drop the gradients, update the loss scale, average under local SGD if due, and return log lines."""
        scaler, gradients = self._parts.scaler, self._parts.gradients
        news = scaler.update(finite=not gradients.overflowed) if scaler.active else None
        gradients.applied()
        if self._parts.local is None:
            return () if news is None else (news,)
        sync_line = self._parts.local.after_step(step, loss, rate)
        return [line for line in (news, sync_line) if line is not None]


def parameters_of(optimizers: Optimizers) -> list[nn.Parameter]:
    return [p for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]]


def _parameter_count(optimizers: Optimizers) -> int:
    return sum(len(group["params"]) for optimizer in optimizers.values() for group in optimizer.param_groups)
