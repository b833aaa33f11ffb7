"""EveryNSteps: decides when a periodic action of a hook is due."""

from __future__ import annotations

from echelon.base.errors import UsageError
from echelon.zoo.entry import Request


class EveryNSteps:
    """The period that a parameter sets, in steps; 0 means never.

    With gradient accumulation a step takes several calls; the action is due only once.
    """

    def __init__(self, request: Request, parameter: str) -> None:
        self.steps = steps_of(request, parameter)
        self._last = 0

    def due(self, step: int) -> bool:
        if not self.steps or step % self.steps or step <= self._last:
            return False
        self._last = step
        return True


def steps_of(request: Request, parameter: str) -> int:
    """Return the value of a parameter that is a number of steps; raise UsageError if it is negative."""
    steps: int = request[parameter]
    if steps < 0:
        raise UsageError(f"--{parameter} {steps} is no number of steps; give 1 or more, or 0 for none")
    return steps
