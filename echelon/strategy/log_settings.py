"""Log: the options for console output and metrics files."""

from __future__ import annotations

from echelon.base.config import require, strict


@strict
class Log:
    """Options for console output and metrics files. Rank 0 prints; every rank writes its own metrics.

    every:       steps between two console lines (and two records in the files), default 10
    dir:         directory of metrics.jsonl, the other records of the run (docs/metrics.md) and TensorBoard files; by
                 default the launcher's log directory, and none if the script runs without the launcher
    console:     False disables console output
    lines:       False disables the console lines of steps, not the records in the files
    progress:    True shows a progress bar; by default only if the console is a terminal
    tensorboard: True also writes TensorBoard event files
    placement:   True prints which module is on which devices (``log_device_placement``)
    timeline:    steps to record on all ranks: "5:10", or True for a few steps after the warm-up (docs/timeline.md)

    >>> engine = echelon.distribute(model, optimizer, loss=loss, log=echelon.Log(every=50, dir="runs/first"))
    """

    every: int = 10
    dir: str | None = None
    console: bool = True
    lines: bool = True
    progress: bool | None = None
    tensorboard: bool = False
    placement: bool = False
    timeline: str | bool | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, self, "every", "1 or more")
        if isinstance(self.timeline, str):
            from echelon.base.recorded_steps import check_steps

            check_steps(self.timeline, "Log(timeline=...)")
