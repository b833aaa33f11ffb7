"""Where the time of a step goes. On a GPU the phases are timed by events on its stream, read once they have passed."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable

import torch

PHASES = ("data", "forward", "backward", "communicate", "update")
Seconds = dict[str, float]


class Clock:
    """Sums the seconds spent in each phase. ``lap(phase)`` ends the phase that began at the previous lap.

    "data" is what passes between two steps: waiting for the next batch, and whatever else the user's loop does.
    """

    def __init__(self) -> None:
        self._seconds: Seconds = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def take(self) -> Callable[[], Seconds]:
        """What was summed since the last taking, as something to be read later."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return lambda: seconds


class CudaClock(Clock):
    """The same on a GPU: the host runs ahead of the device, so its own time would tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[str, torch.cuda.Event]] = [("", _mark())]

    def lap(self, phase: str) -> None:
        self._marks.append((phase, _mark()))

    def take(self) -> Callable[[], Seconds]:
        marks, self._marks = self._marks, self._marks[-1:]

        def read() -> Seconds:
            marks[-1][1].synchronize()
            seconds: Seconds = defaultdict(float)
            for (_, begin), (phase, end) in itertools.pairwise(marks):
                seconds[phase] += begin.elapsed_time(end) / 1e3
            return seconds

        return read


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else Clock()


def _mark() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
