"""``StepClock``: times the phases of a step; on a GPU with CUDA events, which are read after they have completed."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from echelon.distributed.activity import activity

PHASES = ("data", "forward", "backward", "communicate", "update")
Seconds = dict[str, float]
#: Unread phases after which a GPU's events are queried; several steps' worth, so that most have completed.
BEHIND = 50


class StepClock:
    """Sums the seconds spent in each phase. ``lap(phase)`` ends the phase that began at the previous lap.

    "data" is the time between two steps: waiting for the next batch, and other code of the user's loop.
    """

    def __init__(self) -> None:
        self._seconds: Seconds = defaultdict(float)
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = activity.lap(phase)
        self._seconds[phase] += now - self._last
        self._last = now

    def take(self) -> Callable[[], Seconds]:
        """Return a function that reads the seconds per phase since the last ``take``, and start new sums."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return lambda: seconds


class CudaStepClock(StepClock):
    """A ``StepClock`` for a GPU: it uses events, because the host runs ahead of the device."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[str, torch.cuda.Event]] = [("", _mark())]
        self._unread: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def lap(self, phase: str) -> None:
        self._marks.append((phase, _mark()))
        activity.passed(phase)
        self._unread.append((phase, self._marks[-2][1], self._marks[-1][1]))
        if len(self._unread) > BEHIND:
            self._count_work()

    def _count_work(self) -> None:
        """Add the phases that the device has completed to ``activity.busy``, without waiting."""
        while self._unread and self._unread[0][2].query():  # type: ignore[no-untyped-call]
            phase, begin, end = self._unread.popleft()
            activity.busy[phase] += begin.elapsed_time(end) / 1e3

    def take(self) -> Callable[[], Seconds]:
        marks, self._marks = self._marks, self._marks[-1:]

        def read() -> Seconds:
            marks[-1][1].synchronize()
            seconds: Seconds = defaultdict(float)
            for (_, begin), (phase, end) in itertools.pairwise(marks):
                seconds[phase] += begin.elapsed_time(end) / 1e3
            return seconds

        return read


def make_clock(device: torch.device) -> StepClock:
    return CudaStepClock() if device.type == "cuda" else StepClock()


def _mark() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
