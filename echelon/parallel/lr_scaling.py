"""Learning rate scaling with the global batch, with warm-up (Goyal et al., "Accurate, Large Minibatch SGD", 2017)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from echelon.plan import Plan


def rate_factor(plan: Plan, step: int, replicas: int | None = None) -> float:
    """Return the factor of the learning rate at ``step`` (counted from 1).

    An update averages over the batches of all replicas and merged passes, but the learning rate is given for one batch.

    replicas: number of replicas when training began, if that determines the factor; default: the current number
    """
    scaling = plan.lr_scaling
    if scaling is None:
        return 1.0
    full = scaling.factor((replicas or plan.replicas) * plan.gradient_merge)
    warm = min(step / scaling.warmup_steps, 1.0) if scaling.warmup_steps else 1.0
    return 1.0 + (full - 1.0) * warm


def scaled_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> contextlib.AbstractContextManager[None]:
    """Return a context with scaled learning rates, for one step: LR schedulers must see the unscaled rate."""
    return _AS_GIVEN if factor == 1.0 else _multiplied(optimizers, factor)


_AS_GIVEN = contextlib.nullcontext()


@contextlib.contextmanager
def _multiplied(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, given, strict=True):
            group["lr"] = rate
