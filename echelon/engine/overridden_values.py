"""Values that a run was given and its checkpoint overrules: a changed learning rate is said, not dropped in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.engine.lr_schedules import AnyScheduler, PerEpoch

#: How a step is taken is this machine's affair; the rate before a schedule has its own name.
_PASSED_OVER = ("params", "fused", "foreach")
_REMEDY = "to use the new one, set it after distribute(), or begin in another directory"

Facts = dict[str, Any]


class UserHyperparameters:
    """The settings that optimizers and schedules were made with, and the sizes of the loaders' batches."""

    def __init__(self) -> None:
        self._settings: Facts = {}
        self._batches: list[int | None] = []  # of a checkpoint, by the order of its loaders

    def take(self, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Sequence[AnyScheduler]) -> None:
        """Look at them before a step is taken: a loop may set another rate in each step, and that is no setting."""
        groups = {key: [_settings(group) for group in each.param_groups] for key, each in optimizers.items()}
        self._settings = {"optimizers": groups, "schedulers": [_schedule(each) for each in schedulers]}

    def facts(self, loaders: Sequence[Any]) -> Facts:
        """Return what a checkpoint keeps of them."""
        return {**self._settings, "batches": [_batch(loader) for loader in loaders]}

    def resume(self, stored: Facts | None) -> None:
        """Go on with loaders of a checkpoint that keeps this, or nothing."""
        self._batches = (stored or {}).get("batches", [])

    def overruled(self, stored: Facts | None) -> list[str]:
        """Return a line for each value that a checkpoint overrules; from now on its values are the given ones."""
        if not stored:
            return []
        lines, self._settings = _overruled(self._settings, stored), stored
        return lines

    def compare_batch(self, index: int, loader: Any, say: Callable[[str], None]) -> None:
        """Say so if loader ``index`` has another global batch than in the checkpoint."""
        before, now = self._batches[index] if index < len(self._batches) else None, _batch(loader)
        if before is not None and now is not None and before != now:
            say(f"checkpoint: it was saved with a global batch of {before}; from here on it is {now}")


def _batch(loader: Any) -> int | None:
    return getattr(loader, "global_batch", None)


def _overruled(now: Facts, then: Facts) -> list[str]:
    lines = []
    for key, groups in now["optimizers"].items():
        for number, (group, before) in enumerate(zip(groups, then.get("optimizers", {}).get(key, []), strict=False)):
            several = f" of group {number}" if len(groups) > 1 else ""
            lines += [_line(f"optimizer '{key}'{several}: {change}") for change in _changes(group, before)]
    for number, (made, before) in enumerate(zip(now["schedulers"], then.get("schedulers", []), strict=False)):
        lines += [_line(f"scheduler {number}: {change}") for change in _changes(made, before)]
    return lines


def _changes(now: Facts, then: Facts) -> list[str]:
    """Leave out the first rate of a schedule: it follows from the rate itself, kept as ``initial_lr``."""
    names = [name for name in now if name in then and not (name == "lr" and "initial_lr" in now)]
    return [
        f"{'lr' if name == 'initial_lr' else name}={_plain(now[name])} was given, but the checkpoint goes on with "
        f"{_plain(then[name])}"
        for name in names
        if _plain(now[name]) != _plain(then[name])
    ]


def _line(change: str) -> str:
    return f"checkpoint: {change}; {_REMEDY}"


def _settings(group: Mapping[str, Any]) -> Facts:
    plain = {name: _plain(value) for name, value in group.items() if name not in _PASSED_OVER}
    return {name: value for name, value in plain.items() if _is_setting(value)}


def _schedule(given: AnyScheduler) -> Facts:
    """A schedule's settings, without what it counts. Its rates are the optimizer's."""
    scheduler = given.scheduler if isinstance(given, PerEpoch) else given
    kept = {name: _plain(value) for name, value in scheduler.state_dict().items() if not name.startswith("_")}
    counts = ("last_epoch", "base_lrs", "verbose")
    return {name: value for name, value in kept.items() if name not in counts and _is_setting(value)}


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _is_setting(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 16 and all(_is_setting(each) for each in value)
    return isinstance(value, bool | int | float | str)
