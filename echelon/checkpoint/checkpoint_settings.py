"""Checkpoint: what a run says about its checkpoints."""

from __future__ import annotations

from echelon.base.config import require, strict


@strict
class Checkpoint:
    """The directory a run is kept in, and how often.

    dir:          the directory that holds the checkpoints; all hosts must see the same
    every:        save after every so many steps; None saves only when told to
    keep:         keep the newest so many, remove older ones; None keeps all
    asynchronous: write in the background while training goes on
    resume:       start from the newest checkpoint in ``dir``, if there is one
    """

    dir: str
    every: int | None = None
    keep: int | None = None
    asynchronous: bool = True
    resume: bool = True

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, self, "every", "1 or more, or None")
        require(self.keep is None or self.keep >= 1, self, "keep", "1 or more, or None")
