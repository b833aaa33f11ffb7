"""rank-N.jsonl: where one rank's steps went, how long it waited for others, and what memory it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.base.process_info import process_memory
from echelon.distributed.activity import activity
from echelon.observability.runlog.log_files import JsonLinesFile, rank_file


class RankFigures:
    """One rank's own file. Figures are taken without waiting for the device, and written when they have come."""

    def __init__(self, directory: Path, rank: int, device: torch.device) -> None:
        self._lines = JsonLinesFile(directory / rank_file(rank))
        self._device = device
        self._waited = activity.waited
        self._due: Callable[[], dict[str, Any]] | None = None

    def take(self, step: int, steps: int, seconds: Callable[[], dict[str, float]], until: float) -> None:
        """Note ``steps`` steps up to this one. ``seconds``: what each phase took, read later. ``until``: what
        ``activity.waited`` was at its end."""
        self.flush()
        waited, self._waited = until - self._waited, until
        now, (memory, peak) = time.time(), held(self._device)

        def complete() -> dict[str, Any]:
            phases = {phase: round(1e3 * spent / steps, 4) for phase, spent in seconds().items()}
            waits = round(1e3 * waited / steps, 4)
            return {"step": step, "time": now, **phases, "waited": waits, "memory": memory, "peak": peak}

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


def held(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes now and at most so far: of the device on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":  # the allocator's own counts, asked once: memory_allocated() alone sorts all of them
        counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
        allocated = counts.get("allocated_bytes", {}).get("all", {})
        return allocated.get("current"), allocated.get("peak")
    return process_memory()
