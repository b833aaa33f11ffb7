"""How often something is done in a loop that turns faster."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class PollInterval:
    """Tells when another ``seconds`` have passed."""

    seconds: float
    last: float = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True
