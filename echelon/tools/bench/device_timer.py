"""How long something takes here: on the device, and for the host that starts it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
#: One thing that was measured, as the bench file keeps it.
Row = dict[str, Any]

#: Cycles for which a GPU is kept busy while the host queues what is to be timed: 4 ms at 2 GHz.
_HEAD_START = 8_000_000

#: Seconds that a process usually has a core for, where others want it too.
_UNDISTURBED = 0.002

#: Bytes that a core's own cache does not hold.
_BEYOND_CACHE = 2**24


class DeviceTimer:
    """Times calls on one device. ``budget``: seconds to spend on one figure."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget = device, budget

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Call) -> float:
        """Of one ``call`` on the device: the quickest of several rounds. What others do is not its figure."""
        once = self._warm(call)
        if not self.on_gpu:
            return self._undisturbed(call, once)
        times = max(1, min(40, int(self.budget / 4 / once)))  # all must be queued within the head start
        rounds = 4 if once * times * 4 < 4 * self.budget else 2
        return min(self._queued(call, times) for _ in range(rounds))

    def _undisturbed(self, call: Call, once: float) -> float:
        """On a CPU: in rounds so short that among many of them one is not interrupted, whoever else is at work."""
        times = max(1, min(200, int(_UNDISTURBED / once)))
        rounds = max(4, min(60, int(self.budget / (once * times))))
        return min(self._plain(call, times) for _ in range(rounds))

    def seconds_of(self, make: Callable[[], Call], size: float) -> float:
        """As ``seconds``, of a call with operands of ``size`` bytes that ``make`` makes. On a CPU several take turns:
        in training nothing is used twice in a row, and comes from further away than the nearest cache."""
        turns = 1 if self.on_gpu else max(1, min(64, int(_BEYOND_CACHE / size)))
        calls = itertools.cycle([make() for _ in range(turns)])
        return self.seconds(lambda: next(calls)())  # noqa: PLW0108 - another one each time

    def host_seconds(self, call: Call) -> float:
        """Of one ``call`` with all that the host does for it; the device may lag behind."""
        once = self._warm(call)
        if not self.on_gpu:
            return self._undisturbed(call, once)
        times = max(3, int(self.budget / 4 / once))
        rounds = sorted(self._plain(call, times) for _ in range(32))
        return rounds[8]  # it is never at its best for long, and in training seldom at its worst

    def lap(self, call: Call) -> float:
        """Of this one call."""
        return self._plain(call, 1)

    def _warm(self, call: Call) -> float:
        call()
        self.sync()
        start = time.perf_counter()
        call()
        self.sync()
        return max(time.perf_counter() - start, 1e-7)

    def _plain(self, call: Call, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.sync()
        return (time.perf_counter() - start) / times

    def _queued(self, call: Call, times: int) -> float:
        """The device's own time: everything is queued behind a pause, so that it never waits for the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            call()
        end.record()
        self.sync()
        return float(start.elapsed_time(end)) / 1e3 / times
