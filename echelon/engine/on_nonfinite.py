"""``OnNonfinite``: the settings for steps whose loss or gradients are NaN or infinite."""

from __future__ import annotations

from typing import Literal

from echelon.base.config import require, strict

Action = Literal["stop", "skip", "rollback"]


@strict
class OnNonfinite:
    """The reaction to a step whose loss or gradients are NaN or infinite.

    action: "stop" ends the run on all ranks. "skip" applies nothing of that step on any rank, and goes on. "rollback"
            goes back to the last checkpoint and on without that batch, as a run that never saw it
    limit:  number of such steps in a row, or of returns to one checkpoint, after which the run stops all the same

    >>> policy = echelon.OnNonfinite(action="skip", limit=3)
    >>> engine = echelon.distribute(model, optimizer, loss=loss, on_nonfinite=policy)
    """

    action: Action = "stop"
    limit: int = 10

    def __post_init__(self) -> None:
        require(self.limit >= 1, self, "limit", "1 or more")
