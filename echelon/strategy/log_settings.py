"""Log: the options for console output, metrics files and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.base.config import require, strict
from echelon.base.errors import UsageError, nearest

#: Trackers and files by name, with the options that each takes; None: those of the library's own function.
DESTINATIONS: dict[str, tuple[str, ...] | None] = {
    "jsonl": (),
    "tensorboard": (),
    "wandb": None,
    "mlflow": ("experiment_name", "run_name", "tracking_uri", "tags"),
}

Options = Mapping[str, Any]


@strict
class Log:
    """Options for console output, metrics files and trackers. Rank 0 prints; every rank writes its own metrics.

    every:       steps between two console lines (and two records in the files), default 10; rank 0's holds for merging
    dir:         directory of metrics.jsonl, the other records of the run (docs/metrics.md) and TensorBoard files; by
                 default the launcher's log directory, and none if the script runs without the launcher
    console:     False disables console output
    lines:       False disables the console lines of steps, not the records in the files
    progress:    True shows a progress bar; by default only if the console is a terminal
    to:          where records go beside the console: "jsonl", "tensorboard", "wandb", "mlflow", one of these with its
                 options as ("wandb", {"project": "x"}), or a function that is called with each record on rank 0
    tensorboard: True is the same as "tensorboard" in ``to``
    grad_norm:   True records the 2-norm of all gradients every ``every`` steps; with ``Strategy(clip=...)`` it is
                 recorded anyway
    placement:   True prints which module is on which devices (``log_device_placement``)
    timeline:    steps to record on all ranks: "5:10", or True for a few steps after the warm-up (docs/timeline.md)

    >>> engine = echelon.distribute(model, optimizer, loss=loss, log=echelon.Log(every=50, dir="runs/first"))
    """

    every: int = 10
    dir: str | None = None
    console: bool = True
    lines: bool = True
    progress: bool | None = None
    to: Any = ()
    tensorboard: bool = False
    grad_norm: bool = False
    placement: bool = False
    timeline: str | bool | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, self, "every", "1 or more")
        if isinstance(self.timeline, str):
            from echelon.base.recorded_steps import check_steps

            check_steps(self.timeline, "Log(timeline=...)")
        self.destinations()

    def destinations(self) -> list[tuple[str | Callable[[dict[str, Any]], object], Options]]:
        """Return the destinations of ``to`` and ``tensorboard`` with their options; raise ``UsageError`` if unknown."""
        given = self.to if isinstance(self.to, Sequence) and not isinstance(self.to, str) else [self.to]
        if len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], Mapping):
            given = [given]  # one pair without a list around it
        found = [_destination(one) for one in given]
        if self.tensorboard and "tensorboard" not in [name for name, _ in found]:
            found.append(("tensorboard", {}))
        return found


def _destination(given: Any) -> tuple[str | Callable[[dict[str, Any]], object], Options]:
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    name, options = given if is_pair else (given, {})
    if callable(name) and not options:
        return name, {}
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise UsageError(
            f"Log(to=...): {given!r} is no destination; give a name, (name, options) or a function that takes a record"
        )
    if name not in DESTINATIONS:
        raise UsageError(f"Log(to=...): unknown destination '{name}'{nearest(name, DESTINATIONS)}")
    known = DESTINATIONS[name]
    for option in options:
        if known is not None and option not in known:
            what = nearest(option, known) if known else "; it takes none"
            raise UsageError(f"Log(to=...): {name} has no option '{option}'{what}")
    return name, dict(options)
