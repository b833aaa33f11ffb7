"""ProfilerHook: records a timeline of every ``profile_every_n_iters``-th step.

By default the timeline has all ranks on one clock, in ``timeline/step-000100/`` (see echelon/observability/trace). If
``profile_at_task`` is set, torch's profiler records every operator of that rank alone, in
``timeline/step-000100-rank-0.json``. Both open in Perfetto and chrome://tracing. Other steps are not recorded.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from echelon.base.errors import UsageError
from echelon.engine.engine import view_of
from echelon.observability.trace.trace_files import FOLDER
from echelon.observability.trace.trace_session import TraceSession
from echelon.zoo.train.hooks.hook import Hook, HookContext, steps_of


class ProfilerHook(Hook):
    def __init__(self) -> None:
        self._recording: TraceSession | None = None
        self._running: profile | None = None
        self._step = 0  # the step that is recorded; 0 if none

    def begin(self, run: HookContext) -> None:
        self._every = steps_of(run.request, "profile_every_n_iters")
        self._rank: int | None = run.request["profile_at_task"]
        if self._every:
            check_profiled_rank(self._rank, run.engine.world.size)
        self._start_in_time(run)

    def after_step(self, run: HookContext, loss: Tensor) -> None:
        if self._step and run.steps >= self._step:
            self._finish(run)
        self._start_in_time(run)

    def end(self, run: HookContext) -> None:
        if self._recording is not None:
            self._recording.close(view_of(run.engine))
        if self._running is not None:  # the run ended before the step was done
            self._running.stop()
            self._running = None

    def _start_in_time(self, run: HookContext) -> None:
        if not self._every or self._step or (run.steps + 1) % self._every:
            return
        self._step = run.steps + 1
        if self._rank is None:
            folder = run.directory / FOLDER / f"step-{self._step:06d}"
            self._recording = TraceSession(str(self._step), "--profile_every_n_iters", folder)
            self._recording.start(view_of(run.engine))
        elif run.engine.world.rank == self._rank:
            self._start_profile(on_gpu=run.engine.world.device.type == "cuda")

    def _start_profile(self, *, on_gpu: bool) -> None:
        if on_gpu:
            torch.cuda.synchronize()  # kernels of earlier steps must not be recorded
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._running = profile(activities=activities, acc_events=True)  # torch warns about cycles without acc_events
        self._running.start()

    def _finish(self, run: HookContext) -> None:
        if self._recording is not None:
            self._recording.after(view_of(run.engine))
        if self._rank is not None:
            self._finish_profile(run, run.directory / FOLDER / f"step-{self._step:06d}-rank-{self._rank}.json")
        self._step = 0

    def _finish_profile(self, run: HookContext, path: Path) -> None:
        if self._running is not None:
            if run.engine.world.device.type == "cuda":
                torch.cuda.synchronize()
            self._running.stop()
            _write(self._running, path)
            self._running = None
        run.say(f"step {self._step}: timeline of rank {self._rank} in {path}")


def check_profiled_rank(rank: int | None, ranks: int) -> None:
    """Raise UsageError if the job does not have this rank."""
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"--profile_at_task {rank}: this job has {ranks} ranks; give one from 0 to {ranks - 1}")


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
