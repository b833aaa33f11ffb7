"""Measure the training throughput in examples per second, without the start and without evaluations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

WARM_UP = 10  #: first steps that are not counted: they allocate memory, select kernels and compile the model


class Stopwatch:
    def __init__(self, device: torch.device, expected_steps: int | None) -> None:
        self._device = device
        self._skipped = WARM_UP if expected_steps is None else min(WARM_UP, expected_steps // 2)
        self._seen, self._examples, self._since, self._paused = 0, 0.0, self._now(), 0.0

    def step(self, examples: float) -> None:
        self._seen += 1
        if self._seen > self._skipped:
            self._examples += examples
        elif self._seen == self._skipped:
            self._since, self._paused = self._now(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._paused += self._now() - begin

    def examples_per_s(self) -> float | None:
        """Return the throughput; None if no step was counted."""
        seconds = self._now() - self._since - self._paused
        return self._examples / seconds if self._examples and seconds > 0 else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels run asynchronously
        return time.perf_counter()
