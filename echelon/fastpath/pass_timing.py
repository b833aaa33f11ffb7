"""Times forward and backward passes on the device, and detects if they are host-bound."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.fastpath.cuda_graph_capture import Backward, Run

WATCHED = 6  #: number of timed passes
#: A pass is host-bound if the device finishes within this share of its time after the host has launched it. If the
#: device is slower than the host, the lag is as long as its queue: about a thousand kernels.
LAG = 0.1
GROUP = 4  #: consecutive passes of one kind
GROUPS = 4


class EagerTiming:
    """Times some eager passes."""

    def __init__(self) -> None:
        self._clock, self._laps = DeviceClock(), list[PassTimer]()

    @property
    def is_full(self) -> bool:
        return len(self._laps) == WATCHED

    def is_over(self) -> bool:
        return self.is_full and self._laps[-1].is_over()

    def run(self, batch: Any, run: Run) -> tuple[Tensor, Backward]:
        self._laps.append(PassTimer())
        return _timed(run, batch, self._laps[-1])

    def is_host_bound(self) -> bool:
        return statistics.median(lap.lag(self._clock) for lap in self._laps) < LAG * _median(self._laps)


class GraphTimingComparison:
    """Times eager and captured passes in alternating groups, because a device gets slower as it gets warm.

    The first pass of a group is not counted, because the host is ahead of the device after a pass of the other kind.
    """

    def __init__(self) -> None:
        self._written, self._captured = list[PassTimer](), list[PassTimer]()
        self._passes = 0

    @property
    def is_full(self) -> bool:
        return self._passes == GROUP * GROUPS

    def is_over(self) -> bool:
        return self.is_full and self._captured[-1].is_over()

    def run(self, batch: Any, written: Run, captured: Run) -> tuple[Tensor, Backward]:
        run, laps = (captured, self._captured) if self._passes // GROUP % 2 else (written, self._written)
        counts = self._passes % GROUP > 0
        self._passes += 1
        if not counts:
            return run(batch)
        laps.append(PassTimer())
        return _timed(run, batch, laps[-1])

    def seconds(self) -> tuple[float, float]:
        """Return the median seconds of an eager pass and of a captured one."""
        return _median(self._written), _median(self._captured)


class DeviceClock:
    """Converts a device event to host time; the constructor waits for the device once."""

    def __init__(self) -> None:
        self._zero = _event()
        self._zero.record()
        self._zero.synchronize()
        self._at = time.perf_counter()

    def at(self, event: torch.cuda.Event) -> float:
        return self._at + float(self._zero.elapsed_time(event)) / 1e3


class PassTimer:
    """Timer of one forward and backward pass."""

    def __init__(self) -> None:
        self._begin, self._end, self._handed_over = _event(), _event(), 0.0
        self._begin.record()

    def end(self) -> None:
        self._end.record()
        self._handed_over = time.perf_counter()

    def is_over(self) -> bool:
        return self._handed_over > 0 and bool(self._end.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def lag(self, clock: DeviceClock) -> float:
        """Return the seconds from the end of the pass on the host to its end on the device."""
        return clock.at(self._end) - self._handed_over


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _median(laps: Sequence[PassTimer]) -> float:
    return statistics.median(lap.seconds() for lap in laps)


def _timed(run: Run, batch: Any, lap: PassTimer) -> tuple[Tensor, Backward]:
    loss, inner = run(batch)

    def backward(weight: Tensor | float) -> None:
        inner(weight)
        lap.end()

    return loss, backward
