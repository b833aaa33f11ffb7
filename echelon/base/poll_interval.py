"""``PollInterval``: the least time between two runs of an action."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class PollInterval:
    """Limits how often an action runs in a faster loop: ``due`` returns True at most once per ``seconds``.

    last: monotonic time of the last run; by default the first call is due
    """

    seconds: float
    last: float = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True
