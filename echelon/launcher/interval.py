"""``PollInterval``: limits how often an action runs in a faster loop."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class PollInterval:
    """Returns True from ``due`` at most once per ``seconds``."""

    seconds: float
    last: float = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True
