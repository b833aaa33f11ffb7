"""Writes rank-N.jsonl: the phase times of one rank, and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.base.poll_interval import PollInterval
from echelon.base.process_info import process_memory
from echelon.observability.runlog.log_files import JsonLinesFile, rank_file

#: Seconds between two queries of a GPU's driver, which take up to a millisecond.
OFTEN = 1.0


class RankFigures:
    """One rank's file. Numbers are taken without waiting for the device and written once they are available."""

    def __init__(self, directory: Path, rank: int, device: torch.device) -> None:
        self._lines = JsonLinesFile(directory / rank_file(rank))
        self._device = device
        self._due: Callable[[], dict[str, Any]] | None = None
        self._utilisation = Utilisation(device) if device.type == "cuda" else None

    def take(self, step: int, steps: int, seconds: Callable[[], dict[str, float]]) -> None:
        """Record ``steps`` steps up to ``step``.

        seconds: returns the seconds per phase; called later
        """
        self.flush()
        now, (memory, peak) = time.time(), held(self._device)
        more = {} if self._utilisation is None else self._utilisation.record()

        def complete() -> dict[str, Any]:
            phases = {phase: round(1e3 * spent / steps, 4) for phase, spent in seconds().items()}
            return {"step": step, "time": now, **phases, "memory": memory, "peak": peak, **more}

        self._due = complete
        if self._device.type != "cuda":
            self.flush()

    def flush(self) -> None:
        if self._due is not None:
            due, self._due = self._due, None
            self._lines.write(due())

    def close(self) -> None:
        self.flush()
        self._lines.close()


class Utilisation:
    """The share of time in which a GPU runs kernels, as its driver measures it; absent without nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._interval, self._absent = device, PollInterval(OFTEN), False

    def record(self) -> dict[str, Any]:
        """Return the percentage as a field of a record; empty if it is unknown, or was queried within ``OFTEN``."""
        if self._absent or not self._interval.due():
            return {}
        try:
            return {"utilisation": int(torch.cuda.utilization(self._device))}
        except Exception:  # no nvidia-ml-py, or one of its own errors; a figure less must not end the training
            self._absent = True
            return {}


def held(device: torch.device) -> tuple[int | None, int | None]:
    """Return current and peak bytes: of the device on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":  # one query of the allocator, because memory_allocated() alone sorts all its counters
        counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
        allocated = counts.get("allocated_bytes", {}).get("all", {})
        return allocated.get("current"), allocated.get("peak")
    return process_memory()
