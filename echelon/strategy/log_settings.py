"""Log: what a user may ask of the console and the metrics files."""

from __future__ import annotations

from echelon.base.config import require, strict


@strict
class Log:
    """How a run shows itself. Rank 0 speaks; every rank writes down its own figures.

    every:       steps between two lines (and two records in the files)
    dir:         where metrics.jsonl, what the run writes down beside it (docs/metrics.md) and TensorBoard files go; by
                 default the launcher's log directory, and nowhere when the script runs without the launcher
    console:     False keeps the console silent
    lines:       False prints nothing for steps; the files have their records as ever
    progress:    a live bar; by default only when the console is a terminal
    tensorboard: write TensorBoard event files too
    placement:   print which module is on which devices (``log_device_placement``)
    timeline:    steps to record on all ranks, "5:10" or True for some after the warm-up (docs/timeline.md)
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
            from echelon.strategy.recorded_steps import check_steps

            check_steps(self.timeline, "Log(timeline=...)")
