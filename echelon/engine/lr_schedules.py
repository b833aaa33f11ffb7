"""``LRSchedulers``: the learning-rate schedulers of a run, stepped after every update or every epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.training_state import decode, encode

Scheduler = torch.optim.lr_scheduler.LRScheduler


class PerEpoch:
    """A scheduler that is stepped once per epoch of the engine's loader; created by ``echelon.per_epoch``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.epochs = 0  #: number of epochs the scheduler was stepped for

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.scheduler.optimizer

    def reach(self, epoch: int) -> None:
        """Step once for each epoch that has ended since the last call."""
        while self.epochs < epoch:
            _step(self.scheduler)
            self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"epochs", "scheduler"}:
            raise CheckpointError(
                "the checkpoint's scheduler was stepped after every update, this one is after every epoch; build the "
                "same"
            )
        self.epochs = int(state["epochs"])
        self.scheduler.load_state_dict(state["scheduler"])


AnyScheduler = Scheduler | PerEpoch


def per_epoch(scheduler: Scheduler) -> PerEpoch:
    """Return a scheduler that the engine steps after every epoch of its loader instead of every update.

    scheduler: scheduler of torch

    >>> scheduler = echelon.per_epoch(torch.optim.lr_scheduler.StepLR(optimizer, step_size=30))
    >>> engine = echelon.distribute(model, optimizer, loss=loss, scheduler=scheduler)
    """
    return PerEpoch(_checked(scheduler))


class LRSchedulers:
    """The learning-rate schedulers of the optimizers; part of the training state.

    say: logs, once, that epochs are unknown because there is no loader
    """

    def __init__(
        self,
        schedulers: Iterable[AnyScheduler],
        optimizers: Collection[torch.optim.Optimizer],
        say: Callable[[str], None],
    ) -> None:
        self._optimizers, self._say = optimizers, say
        self._all: list[AnyScheduler] = []
        self._late: list[Any] = []  # states for schedulers that are attached later
        self._has_state = False  # True if a checkpoint was loaded
        self._has_spoken = self._has_begun = False
        for scheduler in schedulers:
            self.attach(scheduler)

    @property
    def all(self) -> Sequence[AnyScheduler]:
        return self._all

    def attach(self, scheduler: AnyScheduler) -> None:
        """Add a scheduler; if a checkpoint was loaded before, restore its state from there."""
        plain = scheduler.scheduler if isinstance(scheduler, PerEpoch) else _checked(scheduler)
        if all(plain.optimizer is not each for each in self._optimizers):
            raise UsageError(
                f"the {type(plain).__name__} was made for another optimizer than distribute() was given; make it for "
                "that one"
            )
        if self._has_state and not self._late:
            raise CheckpointError(_differ(len(self._all), len(self._all) + 1))
        self._all.append(scheduler)
        if self._late:
            scheduler.load_state_dict(decode(self._late.pop(0)))
            _apply_rates(plain)

    def attach_late(self, given: AnyScheduler | Sequence[AnyScheduler]) -> None:
        """Add schedulers that could not be created before ``distribute``."""
        if self._all or self._has_begun:
            raise UsageError(
                "engine.scheduler is set once, before the first step, where distribute() was given no scheduler; give "
                "several as a list"
            )
        for scheduler in listed(given):
            self.attach(scheduler)

    def after_update(self, stepped: Collection[torch.optim.Optimizer]) -> None:
        """Step the per-update schedulers of these optimizers."""
        for scheduler in self._all:
            if not isinstance(scheduler, PerEpoch) and scheduler.optimizer in stepped:
                _step(scheduler)

    def before_pass(self, epoch: Callable[[], int | None]) -> None:
        """Step the per-epoch schedulers before a pass.

        epoch: returns the number of epochs that have ended; None without a loader
        """
        if self._late:
            raise CheckpointError(_differ(len(self._all) + len(self._late), len(self._all)))
        self._has_begun = True
        for scheduler in self._all:
            if isinstance(scheduler, PerEpoch):
                self._follow(scheduler, epoch())

    def _follow(self, scheduler: PerEpoch, epoch: int | None) -> None:
        if epoch is not None:
            scheduler.reach(epoch)
        elif not self._has_spoken:
            self._has_spoken = True
            self._say(
                f"scheduler: the {type(scheduler.scheduler).__name__} is for epochs, and without engine.loader() the "
                "engine does not know when one ends; give distribute() the scheduler alone, or call its step() yourself"
            )

    def state(self) -> list[Any]:
        return [encode(scheduler.state_dict()) for scheduler in self._all]

    def restore(self, states: Sequence[Any]) -> None:
        """Restore the schedulers, including those that are attached later."""
        if len(states) < len(self._all):
            raise CheckpointError(_differ(len(states), len(self._all)))
        for scheduler, state in zip(self._all, states, strict=False):
            scheduler.load_state_dict(decode(state))
        self._late, self._has_state = list(states[len(self._all) :]), True


def _step(scheduler: Scheduler) -> None:
    scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # servers step, so torch would warn
    scheduler.step()


def _apply_rates(scheduler: Scheduler) -> None:
    """Write the scheduler's last rates to its optimizer: creating a scheduler has overwritten the loaded ones."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = float(rate)


def _checked(scheduler: Any) -> Scheduler:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError("ReduceLROnPlateau steps on a metric, not on a step; call its step(metric) yourself")
    if not isinstance(getattr(scheduler, "optimizer", None), torch.optim.Optimizer):
        raise UsageError(f"scheduler= takes schedulers of torch.optim.lr_scheduler, got {type(scheduler).__name__}")
    return scheduler  # type: ignore[no-any-return]


def _differ(stored: int, here: int) -> str:
    return f"the checkpoint has {stored} schedulers, this run has {here}; build the same"


def listed(scheduler: AnyScheduler | Sequence[AnyScheduler] | None) -> list[AnyScheduler]:
    """Return the schedulers as a list: one, several or none."""
    return [] if scheduler is None else list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
