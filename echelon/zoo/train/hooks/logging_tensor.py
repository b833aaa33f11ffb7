"""LoggingTensorHook: logs loss and speed every ``log_loss_every_n_iters`` steps; 0 disables it.

The engine prints the lines, because it can do so without waiting for the GPU.
"""

from __future__ import annotations

from typing import Any

from echelon.zoo.entry import Request
from echelon.zoo.train.hooks.every import steps_of
from echelon.zoo.train.hooks.hook import Hook


class LoggingTensorHook(Hook):
    def log_options(self, request: Request) -> dict[str, Any]:
        every = steps_of(request, "log_loss_every_n_iters")
        return {"every": every, "lines": True} if every else {}
