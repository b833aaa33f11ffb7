"""Where the time of a step goes. On a GPU the phases are timed by events on its stream, read once they have passed."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from echelon.distributed.activity import activity

PHASES = ("data", "forward", "backward", "communicate", "update")
Seconds = dict[str, float]
#: Phases after which a GPU is asked which of them are over: some steps' worth, so that most are.
BEHIND = 50


class StepClock:
    """Sums the seconds spent in each phase. ``lap(phase)`` ends the phase that began at the previous lap.

    "data" is what passes between two steps: waiting for the next batch, and whatever else the user's loop does.
    """

    def __init__(self) -> None:
        self._seconds: Seconds = defaultdict(float)
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = activity.lap(phase)
        self._seconds[phase] += now - self._last
        self._last = now

    def take(self) -> Callable[[], Seconds]:
        """What was summed since the last taking, as something to be read later."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return lambda: seconds


class CudaStepClock(StepClock):
    """The same on a GPU: the host runs ahead of the device, so its own time would tell nothing."""

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
        """What the device has done by now, without waiting for it."""
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
