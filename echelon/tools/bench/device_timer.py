"""Time calls on this machine: device time, and host time to launch them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
#: One measurement, as the bench file stores it.
Row = dict[str, Any]

#: Cycles for which a GPU is kept busy while the host queues the calls to be timed: 4 ms at 2 GHz.
_HEAD_START = 8_000_000

#: Seconds for which a process usually keeps a core that other processes want too.
_UNDISTURBED = 0.002

#: Bytes that do not fit into a core's own cache.
_BEYOND_CACHE = 2**24


class DeviceTimer:
    """Times calls on one device. ``budget``: seconds to spend on one measurement."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget = device, budget

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Call) -> float:
        """Return the device seconds of one ``call``: the fastest of several rounds, to exclude other load."""
        once = self._warm(call)
        if not self.on_gpu:
            return self._undisturbed(call, once)
        times = max(1, min(40, int(self.budget / 4 / once)))  # all must be queued within the head start
        rounds = 4 if once * times * 4 < 4 * self.budget else 2
        return min(self._queued(call, times) for _ in range(rounds))

    def _undisturbed(self, call: Call, once: float) -> float:
        """Return the seconds of one ``call`` on a CPU.

        Rounds are so short that at least one of many is not interrupted by other processes.
        """
        times = max(1, min(200, int(_UNDISTURBED / once)))
        rounds = max(4, min(60, int(self.budget / (once * times))))
        return min(self._plain(call, times) for _ in range(rounds))

    def seconds_of(self, make: Callable[[], Call], size: float) -> float:
        """Return ``seconds`` of a call that ``make`` returns, whose operands take ``size`` bytes.

        On a CPU, several calls with their own operands take turns: in training no operand is used twice in a row, so
        operands come from further away than the nearest cache.
        """
        turns = 1 if self.on_gpu else max(1, min(64, int(_BEYOND_CACHE / size)))
        calls = itertools.cycle([make() for _ in range(turns)])
        return self.seconds(lambda: next(calls)())  # noqa: PLW0108 - another one each time

    def host_seconds(self, call: Call) -> float:
        """Return the host seconds of one ``call``; the device may lag behind within a round."""
        once = self._warm(call)
        if not self.on_gpu:
            return self._undisturbed(call, once)
        times = max(3, int(self.budget / 4 / once))
        rounds = sorted(self._plain(call, times) for _ in range(32))
        return rounds[8]  # the lower quartile: in training the host is rarely at its fastest or at its slowest

    def lap(self, call: Call) -> float:
        """Return the seconds of a single ``call``, without warm-up."""
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
        """Return the device seconds of one ``call``, queued behind a sleep kernel so that the GPU never waits."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            call()
        end.record()
        self.sync()
        return float(start.elapsed_time(end)) / 1e3 / times
