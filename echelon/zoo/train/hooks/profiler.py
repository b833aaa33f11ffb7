"""ProfilerHook: a timeline of every ``profile_every_n_iters``-th step, as rank ``profile_at_task`` saw it.

Written as Chrome's trace JSON (chrome://tracing, Perfetto) to ``timeline/step-000100-rank-0.json``. Between two such
steps the profiler is off.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from echelon.errors import UsageError
from echelon.zoo.train.hooks.every import steps_of
from echelon.zoo.train.hooks.hook import Hook, Run


class ProfilerHook(Hook):
    def __init__(self) -> None:
        self._running: profile | None = None
        self._step = 0  # the one that is profiled

    def begin(self, run: Run) -> None:
        self._every = steps_of(run.request, "profile_every_n_iters")
        self._rank: int = run.request["profile_at_task"]
        ranks = run.engine.world.size
        if self._every and not 0 <= self._rank < ranks:
            raise UsageError(
                f"--profile_at_task {self._rank}: this job has {ranks} ranks; give one from 0 to {ranks - 1}"
            )
        self._start_in_time(run)

    def after_step(self, run: Run, loss: Tensor) -> None:
        if self._step and run.steps >= self._step:
            self._finish(run)
        self._start_in_time(run)

    def end(self, run: Run) -> None:
        if self._running is not None:  # its step never came
            self._running.stop()
            self._running = None

    def _start_in_time(self, run: Run) -> None:
        if not self._every or self._step or (run.steps + 1) % self._every:
            return
        self._step = run.steps + 1
        if run.engine.world.rank != self._rank:
            return
        on_gpu = run.engine.world.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()  # what earlier steps left running is no part of this one
        self._running = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        self._running.start()

    def _finish(self, run: Run) -> None:
        path = run.directory / "timeline" / f"step-{self._step:06d}-rank-{self._rank}.json"
        if self._running is not None:
            if run.engine.world.device.type == "cuda":
                torch.cuda.synchronize()
            self._running.stop()
            _write(self._running, path)
            self._running = None
        run.say(f"step {self._step}: timeline of rank {self._rank} in {path}")
        self._step = 0


def _write(profiled: profile, path: Path) -> None:
    aside = path.with_name(f".{path.stem}.writing.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(aside))
        aside.rename(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror}; give another --output_dir") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
