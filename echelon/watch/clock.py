"""Where the time of a step goes. On a GPU the phases are timed by events on its stream, read only when reported."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

PHASES = ("data", "forward", "backward", "communicate", "update")


class Clock:
    """Sums the seconds spent in each phase. ``lap(phase)`` ends the phase that began at the previous lap.

    "data" is what passes between two steps: waiting for the next batch, and whatever else the user's loop does.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last reading."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class CudaClock(Clock):
    """The same on a GPU: the host runs ahead of the device, so its own time would tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[str, torch.cuda.Event]] = [("", _mark())]

    def lap(self, phase: str) -> None:
        self._marks.append((phase, _mark()))

    def read(self) -> dict[str, float]:
        self._marks[-1][1].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += begin.elapsed_time(end) / 1e3
        self._marks = self._marks[-1:]
        return dict(seconds)


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else Clock()


def _mark() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
