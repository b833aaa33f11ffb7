"""``StepClock``: times the phases of a step; on a GPU with CUDA events, which are read after they have completed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import torch

from echelon.distributed.activity import activity
from echelon.observability.runlog.step_phases import BETWEEN

Seconds = dict[str, float]
#: Unread phases after which a GPU's events are queried; several steps' worth, so that most have completed.
BEHIND = 50


class StepClock:
    """Sums the seconds spent in each phase. ``lap(phase)`` ends the phase that began at the previous lap.

    Waits for other ranks and servers count as "communicate" in whichever phase they occur (see ``step_phases``).
    """

    def __init__(self) -> None:
        self._seconds: Seconds = defaultdict(float)
        self._last, self._waited = time.monotonic(), activity.waited

    def lap(self, phase: str) -> None:
        self._end(phase, activity.lap(phase))

    @contextlib.contextmanager
    def apart(self, phase: str) -> Iterator[None]:
        """Count the block as ``phase``, one of ``BETWEEN``, and not as part of a step."""
        self._cut("data")
        try:
            yield
        finally:
            self._cut(phase)

    def _cut(self, phase: str) -> None:
        self._end(phase, time.monotonic())

    def _end(self, phase: str, now: float) -> None:
        waited = 0.0 if phase in BETWEEN else activity.waited - self._waited
        self._seconds[phase] += now - self._last - waited
        if waited:
            self._seconds["communicate"] += waited
        self._last, self._waited = now, activity.waited

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
        self._cut(phase)
        activity.passed(phase)
        self._unread.append((phase, self._marks[-2][1], self._marks[-1][1]))
        if len(self._unread) > BEHIND:
            self._count_work()

    def _cut(self, phase: str) -> None:
        self._marks.append((phase, _mark()))

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
