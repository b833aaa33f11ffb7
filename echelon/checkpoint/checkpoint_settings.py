"""``Checkpoint``: the settings of a run's checkpoints."""

from __future__ import annotations

from echelon.base.config import require, strict


@strict
class Checkpoint:
    """The directory of a run's checkpoints, and how often to save.

    dir:          directory that holds the checkpoints; all hosts must see the same
    every:        number of steps between saves; None saves only on request
    keep:         number of newest checkpoints to keep, older ones are removed; None keeps all
    asynchronous: write in the background while training goes on
    resume:       start from the newest checkpoint in ``dir``, if there is one

    >>> checkpoint = echelon.Checkpoint(dir="runs/checkpoints", every=1000, keep=3)
    >>> engine = echelon.distribute(model, optimizer, loss=loss, checkpoint=checkpoint)
    """

    dir: str
    every: int | None = None
    keep: int | None = None
    asynchronous: bool = True
    resume: bool = True

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, self, "every", "1 or more, or None")
        require(self.keep is None or self.keep >= 1, self, "keep", "1 or more, or None")
