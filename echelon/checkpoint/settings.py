"""``Checkpoint``: what a user says about keeping a run."""

from __future__ import annotations

from echelon.errors import UsageError
from echelon.strict import strict


@strict
class Checkpoint:
    """Where a run is kept, and how often.

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
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value is not None and value < 1:
                raise UsageError(f"Checkpoint({name}={value}): expected 1 or more, or None")
