"""Exceptions at any line of ``ServerState.apply`` and of what it calls."""

from __future__ import annotations

import random
import sys
from types import FrameType, TracebackType
from typing import Any

from scheduler import SimulatedProcess, active

from echelon.parameter_server.server.state import ServerState

_FOLDERS = ("/parameter_server/server/", "/parameter_server/table/")


class ApplyFaults:
    """The exceptions in store for processes. Inside the context ``apply`` raises them.

    used:  number of exceptions raised so far
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.armed: dict[SimulatedProcess, int] = {}
        self.used = 0

    def arm(self, process: SimulatedProcess) -> None:
        """Let the process's next changes fail at a random line."""
        self.armed[process] = self._rng.randint(1, 120)

    def __enter__(self) -> None:
        self._apply = ServerState.apply

        def apply(state: ServerState, frame: Any) -> Any:
            process = active().current.process
            if process is None or process not in self.armed:
                return self._apply(state, frame)
            return self._failing(process, state, frame)

        ServerState.apply = apply  # type: ignore[method-assign]

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ServerState.apply = self._apply  # type: ignore[method-assign]

    def _failing(self, process: SimulatedProcess, state: ServerState, frame: Any) -> Any:
        def tracer(at: FrameType, event: str, _: Any) -> Any:
            if not any(folder in at.f_code.co_filename for folder in _FOLDERS):
                return None
            if event == "line" and process in self.armed:
                self.armed[process] -= 1
                if not self.armed[process]:
                    del self.armed[process]
                    self.used += 1
                    kind = self._rng.choice((MemoryError, RuntimeError))
                    active().log(f"{kind.__name__} at {at.f_code.co_filename.rpartition('/')[2]}:{at.f_lineno}")
                    raise kind("made up by the simulation")
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            return self._apply(state, frame)
        finally:
            sys.settrace(before)
