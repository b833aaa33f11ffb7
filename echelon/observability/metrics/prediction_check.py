"""``PredictionCheck``: compares predicted and measured time and memory of a plan, once, after some steps."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.base.formatting import duration, size

#: Warm-up steps that are not measured (allocation, compilation, connections, caches), and measured steps after them.
WARM, COUNTED = 5, 15
#: Warm-up steps if a step may become a CUDA graph, which is timed beside the eager step first.
WARM_WITH_GRAPHS = 60


class PredictionOutcome(NamedTuple):
    line: str
    record: dict[str, Any]


class PredictionCheck:
    """Compares one prediction with measurements.

    seconds: predicted time of a step
    memory:  predicted bytes on this device
    held:    bytes of the model that are allocated already
    warm:    number of first steps that are not measured
    """

    def __init__(self, seconds: float, memory: float, held: float, device: torch.device, warm: int = WARM) -> None:
        self._seconds, self._memory, self._device, self._warm = seconds, memory, device, warm
        self._before = _resident(device) - held
        _forget_peak(device)
        self._steps, self._begun = 0, 0.0

    def step(self) -> PredictionOutcome | None:
        """Count a step and return the outcome after enough steps, else None."""
        self._steps += 1
        if self._steps == self._warm:
            self._begun = _now(self._device)
        if self._steps < self._warm + COUNTED:
            return None
        seconds = (_now(self._device) - self._begun) / COUNTED
        memory = max(0.0, _peak(self._device) - self._before)
        return PredictionOutcome(self._line(seconds, memory), self._record(seconds, memory))

    def _line(self, seconds: float, memory: float) -> str:
        off = f"{seconds / self._seconds - 1:+.0%}"
        time_ = f"predicted {duration(self._seconds)} a step, measured {duration(seconds)} ({off})"
        return f"{time_}; memory predicted {size(self._memory)}, measured {size(memory)}"

    def _record(self, seconds: float, memory: float) -> dict[str, Any]:
        return {
            "predicted_step_ms": 1e3 * self._seconds,
            "measured_step_ms": 1e3 * seconds,
            "predicted_memory": self._memory,
            "measured_memory": memory,
        }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _resident(device: torch.device) -> float:
    """Return the allocated bytes on a GPU; on a CPU the resident bytes of the whole process."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    with contextlib.suppress(OSError):
        return float(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    return 0.0


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
