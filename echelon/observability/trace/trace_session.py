"""``TraceSession``: records some steps of an engine's run on all ranks into one timeline.

Before and after, the ranks compare their clocks. They send their spans to rank 0 over the job's own process group,
because hosts need not share a disk; rank 0 writes the files. Workers that are connected only to parameter servers write
one file each, and the reader merges them. Until then every rank has its spans in a partial file (see ``live_writer``),
which is what remains of a run that ends early.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from echelon.base.environment import TIMELINE
from echelon.base.errors import EchelonError, PeerLost, UsageError, first_line
from echelon.base.recorded_steps import AFTER_WARM_UP, RecordedSteps, parse_steps
from echelon.distributed.activity import activity, waiting
from echelon.observability.trace import trace_files
from echelon.observability.trace.clock_sync import ClockMapping, ClockOffset, measure
from echelon.observability.trace.comm_hooks import CommHooks, spans_of
from echelon.observability.trace.device_trace import DeviceTrace, device_spans
from echelon.observability.trace.flops import ModelCallHook, can_count_flops, count_flops
from echelon.observability.trace.live_writer import LiveSpanWriter
from echelon.observability.trace.merge import merge
from echelon.observability.trace.rank_header import about
from echelon.observability.trace.span import Span
from echelon.observability.trace.span_recorder import TraceRecorder
from echelon.optim.grad_scaler import DTYPES

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView
    from echelon.strategy.log_settings import Log


#: Bytes of all ranks' files beyond which rank 0 does not merge them at once, because the other ranks would wait.
LARGE = 32_000_000


def requested_session(log: Log, directory: Path | None) -> TraceSession | None:
    """Return the trace session that ``echelon run --timeline`` or ``Log(timeline=...)`` requests, or None."""
    text = os.environ.get(TIMELINE) or (AFTER_WARM_UP if log.timeline is True else log.timeline)
    if not text:
        return None
    if directory is None:
        raise UsageError("Log(timeline=...) needs a directory: give Log(dir=...), or use 'echelon run'")
    return TraceSession(
        text, "--timeline" if TIMELINE in os.environ else "Log(timeline=...)", directory / trace_files.FOLDER
    )


class _ActiveTrace(NamedTuple):
    recorder: TraceRecorder
    taps: CommHooks
    device: DeviceTrace | None
    seen: ModelCallHook | None
    before: ClockOffset
    live: LiveSpanWriter


class TraceSession:
    """One trace of some steps; ``after(engine)`` is called after every step until the session is ``over``.

    steps:   steps to record as text, see ``parse_steps``
    option:  name of the option that requested them, for messages
    folder:  directory of the files
    """

    def __init__(self, steps: str, option: str, folder: Path) -> None:
        self._requested, self._option, self._folder = steps, option, folder
        self._steps: RecordedSteps | None = None
        self._under_way: _ActiveTrace | None = None
        self._flops: float | None = None
        self.over = False
        parse_steps(steps, option, 0)

    def begin(self, engine: EngineView) -> None:
        """Start before the first step if the requested steps include step 1."""
        if engine.trial is not None:
            self.over = True
        elif engine.steps == 0 and parse_steps(self._requested, self._option, 0).first == 1:
            self.start(engine)

    def start(self, engine: EngineView) -> None:
        """Start recording with the next step. All ranks call it together."""
        self._steps = self._steps or parse_steps(self._requested, self._option, engine.steps)
        if activity.recorder is not None:
            self.over = True
            engine.say(f"{self._option}: another timeline is being recorded; this one is skipped")
        else:
            self._start(engine)

    def after(self, engine: EngineView, total: int | None = None) -> None:
        """Start, continue or finish after a step, unless the session is over.

        total: last step of the run; None if unknown
        """
        if not self.over:
            self._after(engine, total)

    def _after(self, engine: EngineView, total: int | None) -> None:
        if self._steps is None:
            self._steps = parse_steps(self._requested, self._option, engine.steps - 1)
        if self._under_way is not None and self._under_way.recorder.step != engine.steps + 1:
            self._drop()  # the run has loaded a checkpoint meanwhile
        if self._under_way is not None:
            self._under_way.live.step()
            if engine.steps >= self._steps.last or engine.steps == total:
                self._finish(engine)
        elif engine.steps >= self._steps.last:
            self.over = True
            past = f"{self._steps} lie before step {engine.steps}, where this run has begun"
            engine.say(f"{self._option}: {past}; nothing is recorded")
        elif engine.steps + 1 >= self._steps.first:
            self.start(engine)

    def close(self, engine: EngineView) -> None:
        """End the session with the run. An unfinished trace lacks communication: other ranks may have ended."""
        if self.over:
            return
        self.over = True
        if self._under_way is None:
            if engine.steps and self._steps is not None:
                engine.say(f"{self._option}: the run ended after step {engine.steps}, before {self._steps} began")
            return
        error = getattr(sys, "last_value", None)
        live, recorder = self._under_way.live, self._under_way.recorder
        # after an error the GPU may wait forever for a lost rank, so it is not synchronized
        kernels = self._stop_device() if error is None else []
        if error is None and not recorder.spans:  # the run was over before another step began
            live.remove()
            self._let_go()
            with contextlib.suppress(OSError):  # succeeds only on the last rank, when the folder is empty
                self._folder.rmdir()
            return
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" if error is not None else ""
        live.end(said, isinstance(error, PeerLost), kernels)
        self._let_go()
        if recorder.spans:
            engine.say(f"timeline: the run ended in {self._steps}; 'echelon timeline {self._folder.parent}' shows it")

    # ---- begin and end ----

    def _start(self, engine: EngineView) -> None:
        device = None
        if engine.world.device.type == "cuda":
            device = DeviceTrace()
            try:
                device.start()
            except RuntimeError as error:  # another profiler is running
                device = None
                engine.say(f"timeline: GPU spans are not recorded ({first_line(error)})")
        self._make_way(engine)
        control = engine.world.control
        with waiting("timeline: clocks", "", control):
            before = measure(control)
            if control is not None:
                dist.barrier(control)  # so that no rank's first step waits for the clocks of others
        recorder = TraceRecorder(engine.steps + 1)
        own_loop = engine.steps == 0 or engine.has_own_loop
        seen = ModelCallHook(engine.model, recorder) if own_loop and can_count_flops(engine) else None
        taps = CommHooks(recorder)
        if control is not None:
            taps.open()
        live = self._live(engine, before, recorder, taps)
        self._under_way = _ActiveTrace(recorder, taps, device, seen, before, live)
        activity.record_with(recorder)

    def _make_way(self, engine: EngineView) -> None:
        try:
            if engine.world.rank == 0:
                trace_files.forget(self._folder, beyond=engine.world.size)
            trace_files.make_way(self._folder, engine.world.rank)
        except OSError as error:
            engine.say(f"timeline: '{self._folder}' cannot be emptied: {error.strerror}")

    def _live(
        self, engine: EngineView, before: ClockOffset, recorder: TraceRecorder, taps: CommHooks
    ) -> LiveSpanWriter:
        assert self._steps is not None
        header = about(engine, ClockMapping(before, before), self._steps)
        return LiveSpanWriter(self._folder, engine.world.rank, header, recorder, taps)

    def _let_go(self) -> None:
        """Stop recording and remove all hooks."""
        assert self._under_way is not None
        activity.record_with(None)
        self._under_way.taps.close()
        if self._under_way.seen is not None:
            self._under_way.seen.close()
        self._under_way = None

    def _drop(self) -> None:
        assert self._under_way is not None
        if self._under_way.device is not None:
            self._under_way.device.stop()
        self._under_way.live.remove()
        self._let_go()

    def _stop_device(self) -> list[Span]:
        """Stop recording the GPU and return its spans on this process's clock."""
        assert self._under_way is not None
        recorder, taps, device = self._under_way[:3]
        return device_spans(device.stop(), recorder.spans, taps.messages) if device is not None else []

    def _stop(self, engine: EngineView) -> tuple[list[Span], ClockMapping]:
        """Stop recording and return this rank's spans on rank 0's clock, with the clock. All ranks call it together."""
        assert self._under_way is not None
        recorder, taps, _, seen, before, _ = self._under_way
        activity.record_with(None)
        taps.close()
        if seen is not None:
            seen.close()
        spans = [*recorder.spans, *spans_of(taps.messages), *self._stop_device()]
        after = before
        if engine.world.control is not None:
            with waiting("timeline: clocks", "", engine.world.control):
                after = measure(engine.world.control)
        self._flops = _flops(engine, recorder)
        clock = ClockMapping(before, after)
        return [span.moved(clock) for span in spans if span.step < recorder.step], clock

    def _finish(self, engine: EngineView) -> None:
        assert self._under_way is not None
        assert self._steps is not None
        self.over = True
        spans, clock = self._stop(engine)
        live = self._under_way.live
        self._let_go()
        if live.failed:
            engine.say(f"timeline: {live.failed}")
        header = about(engine, clock, self._steps)
        header |= {"steps": [min(s.step for s in spans), max(s.step for s in spans)], "flops": self._flops}
        try:
            self._gather(engine, header, spans, live)
        except EchelonError as error:  # for example a full disk, which must not end the training
            engine.say(f"timeline: {error}")

    def _gather(self, engine: EngineView, header: dict[str, Any], spans: list[Span], live: LiveSpanWriter) -> None:
        """Send the spans to rank 0, which writes the complete files; they replace the partial files."""
        control, content = engine.world.control, trace_files.lines_of(header, spans).encode()
        if control is not None and dist.get_rank(control) > 0:
            _send(content, control)
            _hear_that_it_is_kept(control, live)
            return
        received = {engine.world.rank: content} | (_receive(control) if control is not None else {})
        kept = False
        try:
            for rank, each in received.items():
                trace_files.write(self._folder, trace_files.rank_file_name(rank), each)
            kept = True
        finally:
            if control is not None:
                _say_that_it_is_kept(control, kept)
        live.remove()
        if engine.world.rank == 0:
            self._report(engine)

    def _report(self, engine: EngineView) -> None:
        if engine.world.size > 1 and engine.world.control is None:
            engine.say(f"timeline: 'echelon timeline {self._folder.parent}' shows all workers when they are done")
            return
        if sum(file.stat().st_size for file in trace_files.of_ranks(self._folder).values()) > LARGE:
            engine.say(f"timeline: recorded; 'echelon timeline {self._folder.parent}' puts all ranks together")
            return
        for line in merge(self._folder).lines():
            engine.say(line)


# ---- gather on rank 0 ----


def _flops(engine: EngineView, recorder: TraceRecorder) -> float | None:
    """Return the FLOPs of a step on this rank; None if they cannot be counted."""
    if recorder.arguments is None or not can_count_flops(engine):
        return None
    amp = DTYPES[engine.plan.amp.dtype] if engine.plan.amp is not None else None
    found = count_flops(engine.model, recorder.arguments, amp, engine.world.device)
    return None if found is None else found * engine.plan.gradient_merge


def _send(content: bytes, control: dist.ProcessGroup) -> None:
    first = dist.get_global_rank(control, 0)
    with waiting("timeline: gather", "", control):
        dist.send(torch.tensor([len(content)]), first, group=control)
        dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), first, group=control)


def _receive(control: dist.ProcessGroup) -> dict[int, bytes]:
    """Receive the files of the other ranks, one after the other, and return them by rank."""
    found = {}
    for place in range(1, dist.get_world_size(control)):
        rank, size = dist.get_global_rank(control, place), torch.zeros(1, dtype=torch.int64)
        with waiting("timeline: gather", "", str(rank)):
            dist.recv(size, rank, group=control)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, rank, group=control)
        found[rank] = content.numpy().tobytes()
    return found


def _say_that_it_is_kept(control: dist.ProcessGroup, kept: bool) -> None:
    """Broadcast from rank 0 that the files are written, so that the other ranks can remove their partial files."""
    with waiting("timeline: gather", "", control):
        dist.broadcast(torch.tensor([int(kept)]), dist.get_global_rank(control, 0), group=control)


def _hear_that_it_is_kept(control: dist.ProcessGroup, live: LiveSpanWriter) -> None:
    kept = torch.zeros(1, dtype=torch.int64)
    with waiting("timeline: gather", "", control):
        dist.broadcast(kept, dist.get_global_rank(control, 0), group=control)
    live.remove() if bool(kept) else live.close()
