"""Reports hyperparameters that a checkpoint overrides, such as a changed learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.engine.lr_schedules import AnyScheduler, PerEpoch

#: Keys of a parameter group that are not compared; fused and foreach depend on the machine.
_PASSED_OVER = ("params", "fused", "foreach")
_REMEDY = "to use the new one, set it after distribute(), or begin in another directory"

Facts = dict[str, Any]


class UserHyperparameters:
    """The settings that optimizers and schedulers were created with, and the batch sizes of the loaders."""

    def __init__(self) -> None:
        self._settings: Facts = {}
        self._batches: list[int | None] = []  # global batches in the checkpoint, in the order of its loaders

    def take(self, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Sequence[AnyScheduler]) -> None:
        """Record the settings before the first step, because a loop may set another learning rate in each step."""
        groups = {key: [_settings(group) for group in each.param_groups] for key, each in optimizers.items()}
        self._settings = {"optimizers": groups, "schedulers": [_schedule(each) for each in schedulers]}

    def facts(self, loaders: Sequence[Any]) -> Facts:
        """Return the settings for a checkpoint."""
        return {**self._settings, "batches": [_batch(loader) for loader in loaders]}

    def resume(self, stored: Facts | None) -> None:
        """Set the batch sizes of a checkpoint for ``compare_batch``; ``stored`` is None for old checkpoints."""
        self._batches = (stored or {}).get("batches", [])

    def overruled(self, stored: Facts | None) -> list[str]:
        """Return a log line for each setting that a checkpoint overrides, and use the stored settings from now on."""
        if not stored:
            return []
        lines, self._settings = _overruled(self._settings, stored), stored
        return lines

    def compare_batch(self, index: int, loader: Any, say: Callable[[str], None]) -> None:
        """Log a line if loader ``index`` has another global batch than in the checkpoint."""
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
    """Return text for each changed setting; ``lr`` is skipped if ``initial_lr`` is there, which determines it."""
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
    """Return a scheduler's settings without its counters and rates; the optimizer has the rates."""
    scheduler = given.scheduler if isinstance(given, PerEpoch) else given
    kept = {name: _plain(value) for name, value in scheduler.state_dict().items() if not name.startswith("_")}
    counts = ("last_epoch", "base_lrs", "verbose")
    return {name: value for name, value in kept.items() if name not in counts and _is_setting(value)}


def _plain(value: Any) -> Any:
    """Return the value as it is after a JSON round trip."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _is_setting(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 16 and all(_is_setting(each) for each in value)
    return isinstance(value, bool | int | float | str)
