"""Learning-rate schedules: a decay times a warm-up, with the option names of the zoo's parameter table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.base.errors import UsageError, nearest

#: scheme: (fraction of all steps after which halving starts, number of halvings)
LUONG = {"luong234": (2 / 3, 4), "luong5": (1 / 2, 5), "luong10": (1 / 2, 10)}
DECAYS = ("fixed", "exponential", "polynomial", *LUONG)
POSITION = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


class Schedule(LRScheduler):
    """The schedule ``lr = base_lr * decay(step) * warmup(step)`` of each parameter group; call ``step()`` once a step.

    optimizer:    optimizer of torch
    total_steps:  number of training steps; required by the luong schemes
    decay:        "fixed"        constant learning rate (default)
                  "exponential"  multiplied by ``decay_factor`` after every ``decay_steps``
                  "polynomial"   linear to ``end_lr`` over ``decay_steps``, by default ``total_steps``
                  "luong234"     halved 4 times at equal distances, the first time at 2/3 of ``total_steps``
                  "luong5"       halved 5 times, the first time at 1/2 of ``total_steps``
                  "luong10"      halved 10 times, the first time at 1/2 of ``total_steps``
    warmup_steps: number of warm-up steps; default 0
    warmup:       "t2t"          exponential growth from 1/100 over ``warmup_steps`` (default)
                  "linear"       linear growth: 1/n in the first step, the full rate in the n-th
    end_lr:       lowest learning rate of any decay; default 0
    decay_steps:  number of steps, see "exponential" and "polynomial"
    decay_factor: factor of the exponential decay; default 0.94

    The state dict has only the position in the schedule; its shape is that of the current run.

    >>> scheduler = echelon.optim.Schedule(optimizer, total_steps=1000, decay="luong234", warmup_steps=100)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int | None = None,
        decay: str = "fixed",
        warmup_steps: int = 0,
        warmup: str = "t2t",
        end_lr: float = 0.0,
        decay_steps: int | None = None,
        decay_factor: float = 0.94,
    ) -> None:
        if decay == "polynomial" and decay_steps is None:
            decay_steps = total_steps
        _check_words(decay, warmup)
        _check_counts(decay, total_steps, warmup_steps, decay_steps)
        _check_rates(end_lr, decay_factor)
        self.total_steps, self.decay, self.decay_steps, self.decay_factor = (
            total_steps,
            decay,
            decay_steps,
            decay_factor,
        )
        self.warmup, self.warmup_steps, self.end_lr = warmup, warmup_steps, end_lr
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at this step, in closed form, so that rounding does not accumulate."""
        step = self.last_epoch
        return [self._decayed(base, step) * self._warmth(step) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in POSITION}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        unknown = set(POSITION) - set(state_dict)
        if unknown:
            raise UsageError(f"this is no Schedule's state: it lacks {sorted(unknown)[0]!r}")
        self.__dict__.update({name: state_dict[name] for name in POSITION})

    def _decayed(self, base: float | Tensor, step: int) -> float | Tensor:
        floor = min(base, self.end_lr)  # end_lr never raises a rate that is already lower
        if self.decay == "polynomial":
            assert self.decay_steps is not None
            return floor + (base - floor) * (1 - min(step / self.decay_steps, 1.0))
        return max(base * self._factor(step), floor)

    def _factor(self, step: int) -> float:
        if self.decay == "exponential":
            assert self.decay_steps is not None
            return float(self.decay_factor ** (step // self.decay_steps))
        if self.decay in LUONG:
            return 0.5 ** self._halvings(step)
        return 1.0

    def _halvings(self, step: int) -> int:
        assert self.total_steps is not None
        part, times = LUONG[self.decay]
        start = round(self.total_steps * part)
        if step < start:
            return 0
        rest = max(self.total_steps - start, 1)
        return min(1 + (step - start) * times // rest, times)

    def _warmth(self, step: int) -> float:
        if step >= self.warmup_steps:
            return 1.0
        if self.warmup == "linear":
            return (step + 1) / self.warmup_steps
        return math.exp(math.log(0.01) * (self.warmup_steps - step) / self.warmup_steps)


def _check_words(decay: str, warmup: str) -> None:
    if decay not in DECAYS:
        raise UsageError(f"Schedule(decay={decay!r}) is unknown{nearest(str(decay), DECAYS)}")
    if warmup not in ("t2t", "linear"):
        raise UsageError(f"Schedule(warmup={warmup!r}) is unknown{nearest(str(warmup), ('t2t', 'linear'))}")


def _check_counts(decay: str, total: int | None, warmup: int, decay_steps: int | None) -> None:
    for name, value, least in (("total_steps", total, 1), ("warmup_steps", warmup, 0), ("decay_steps", decay_steps, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UsageError(f"Schedule({name}={value!r}): expected a whole number of {least} or more")
    if decay in LUONG and total is None:
        raise UsageError(f"Schedule(decay='{decay}') needs total_steps: it decays over the last part of them")
    if decay == "polynomial" and decay_steps is None:
        raise UsageError("Schedule(decay='polynomial') needs total_steps or decay_steps, the step that reaches end_lr")
    if decay == "exponential" and decay_steps is None:
        raise UsageError(
            "Schedule(decay='exponential') needs decay_steps, the steps between two multiplications by decay_factor"
        )


def _check_rates(end_lr: float, factor: float) -> None:
    tests: tuple[tuple[str, float, Callable[[float], bool], str], ...] = (
        ("end_lr", end_lr, lambda value: value >= 0, "a number of 0 or more"),
        ("decay_factor", factor, lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    )
    for name, value, holds, words in tests:
        if not isinstance(value, int | float) or isinstance(value, bool) or not holds(value):
            raise UsageError(f"Schedule({name}={value!r}): expected {words}")
