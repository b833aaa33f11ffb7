"""Every: when something that happens every so many steps is due."""

from __future__ import annotations

from echelon.base.errors import UsageError
from echelon.zoo.entry import Request


class EveryNSteps:
    """The parameter's number of steps; 0 is never. A step that merged gradients take several turns for is due once."""

    def __init__(self, request: Request, parameter: str) -> None:
        self.steps = steps_of(request, parameter)
        self._last = 0

    def due(self, step: int) -> bool:
        if not self.steps or step % self.steps or step <= self._last:
            return False
        self._last = step
        return True


def steps_of(request: Request, parameter: str) -> int:
    """A parameter that counts steps."""
    steps: int = request[parameter]
    if steps < 0:
        raise UsageError(f"--{parameter} {steps} is no number of steps; give 1 or more, or 0 for none")
    return steps
