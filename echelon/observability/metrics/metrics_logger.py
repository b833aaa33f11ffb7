"""``MetricsLogger``: collects the metrics of each step and passes a record to the sinks every few steps."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from echelon.base.console import say
from echelon.base.errors import UsageError
from echelon.observability.metrics.deferred_scalar import DeferredScalar
from echelon.observability.metrics.destinations import Destinations
from echelon.observability.metrics.logged_numbers import LoggedNumbers, Merged
from echelon.observability.metrics.prediction_check import WARM, WARM_WITH_GRAPHS, PredictionCheck
from echelon.observability.metrics.rank_merge import RankMerge
from echelon.observability.metrics.sinks import ConsoleSink, ProgressBarSink, Sink
from echelon.observability.metrics.step_clock import Seconds, make_clock
from echelon.observability.metrics.step_extras import StepExtras
from echelon.observability.metrics.tracker_runs import TrackerRuns
from echelon.observability.metrics.trackers import Record
from echelon.observability.runlog.log_files import CORPORA, LOGGED, launcher_run_directory
from echelon.strategy.log_settings import Log

if TYPE_CHECKING:
    from echelon.distributed.world import World
    from echelon.observability.runlog.rank_log import RankFigures
    from echelon.observability.runlog.run_log_writer import RunLogWriter


class _FinishedStep(NamedTuple):
    """A finished step.

    norm:   norm of the gradients before clipping; None without clipping
    time:   wall-clock time of its end, seconds
    at:     time of its end on the clock that measures speed, seconds
    """

    step: int
    loss: Tensor
    rate: float
    total: int | None
    time: float
    at: float
    norm: Tensor | None = None


class MetricsLogger:
    """Writes metrics on rank 0; on other ranks it has only the clock and the per-rank file."""

    def __init__(self, log: Log, device: torch.device, rank: int) -> None:
        self.clock = make_clock(device)
        self._device = device
        self._foretold: PredictionCheck | None = None
        self._every, self._log = log.every, log
        self._speaks = rank == 0
        self._sinks: list[Sink] | None = None  # of all records
        self._lines: list[Sink] = []  # of records of steps only
        self._due: Callable[[], Record] | None = None
        self._last: _FinishedStep | None = None  # the newest step, until a record includes it
        self._steps = 0
        self._examples: Tensor | float | None = 0.0  # None if the number is unknown for some step
        self._since = time.perf_counter()
        self.directory = _directory(log)
        self._figures = _figures(self.directory, rank, device)
        self._destinations = Destinations(log, self.directory, is_first=self._speaks)
        self._open_files: Callable[[], list[Sink]] = list
        #: settings that must be equal on all ranks: steps between two records, and whether norms are recorded
        self.terms: list[Any] = [log.every, log.grad_norm]
        self._numbers = LoggedNumbers(rank)
        self._merge = RankMerge(rank, self._numbers, self._write_logged, say)
        self.extras = StepExtras(self._numbers.__bool__, self._speaks)
        self._peak_seconds: Callable[[], float | None] = lambda: None
        self._corpora: list[Callable[[], Mapping[str, int]]] = []

    def connect(self, run_log: RunLogWriter, warn: Callable[[str], None], renew_exit: Callable[[], None]) -> None:
        """Set what files and trackers need of the run.

        warn:       callback for one line on a tracker that fails
        renew_exit: callback that keeps the run's exit handler in front of a tracker's
        """
        runs = TrackerRuns(self.directory, lambda: run_log.goes_on, run_log.tracked)
        self._peak_seconds = lambda: run_log.peak_seconds
        self._open_files = lambda: self._destinations.open(runs, warn, renew_exit)

    def join(self, world: World, ranks: Sequence[int] | None, can_have_tokens: bool) -> None:
        """Set the place of this rank in the plan.

        ranks:           ranks that share this rank's loss; None if it steps alone
        can_have_tokens: False if ids in a batch are those of sparse tables
        """
        self.extras.join(world.data_size if ranks is None else 1, None if can_have_tokens else False)
        self._merge.join(world.data_rank, ranks, self.terms[0])

    def count_corpora(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Record how many samples each corpus has given. ``read`` returns the numbers up to the batch of this step."""
        self._corpora.append(read)

    def norm_due(self, step: int) -> bool:
        """Return True if the norm of the gradients of this step is to be recorded, on all ranks alike."""
        return self.has_norms and step % self.terms[0] == 0

    @property
    def has_norms(self) -> bool:
        """True if norms of gradients are recorded."""
        return bool(self.terms[1])

    @property
    def has_trackers(self) -> bool:
        return self._destinations.has_trackers

    @property
    def notices(self) -> list[str]:
        """Log lines on requested outputs that cannot be written. The run continues without them."""
        return self._destinations.notices

    def say(self, text: str) -> None:
        """Print a line on rank 0 that is not part of a record."""
        if self._speaks and self._log.console:
            say(text, stdout=True)

    def note_prediction(self, seconds: float, memory: float, held: float, graphs: bool = False) -> None:
        """Compare the predicted time and memory of a step with measurements after some steps.

        Timing restarts here, because the time to find the plan is not part of a step.

        seconds: predicted time of a step
        memory:  predicted bytes on this device
        held:    bytes of the model that are allocated already
        graphs:  True if a step may become a CUDA graph
        """
        if self._speaks:
            warm = WARM_WITH_GRAPHS if graphs else WARM
            self._foretold = PredictionCheck(seconds, memory, held, self._device, warm)
        self.clock.lap("data")
        self.clock.take()
        self._since = time.perf_counter()

    def step(
        self,
        step: int,
        loss: Tensor,
        examples: Tensor | float | None,
        rate: float,
        total: int | None,
        norm: Tensor | None = None,
    ) -> None:
        """Record a finished step, and write a record every few steps.

        examples: None if unknown
        norm:     norm of the gradients before clipping; None without clipping
        """
        if self._due is not None or self._figures is not None:
            self._flush()
        self._merge.after_step(step, self.extras.pending)
        self._steps += 1
        self._last = _FinishedStep(step, loss, rate, total, time.time(), time.perf_counter(), norm)
        if not self._speaks:
            if step % self._every == 0 or step == total:
                self._take(self._last)  # even without a file, because the clock's list would grow
            return
        if self._foretold is not None and (comparison := self._foretold.step()) is not None:
            self._foretold = None
            self.say(comparison.line)
            self.note({"step": step, **comparison.record})
        self._examples = None if self._examples is None or examples is None else self._examples + examples
        if step % self._every and step != total:
            return
        self._take(self._last)
        if not loss.is_cuda or step == total:
            self._flush()

    def _take(self, last: _FinishedStep) -> None:
        """Start a record of all steps since the previous record, up to the step ``last``."""
        seconds = functools.cache(self.clock.take())
        if self._figures is not None:
            self._figures.take(last.step, self._steps, seconds)
        if self._speaks:
            self._due = self._pending(last, seconds)
        self._steps, self._last = 0, None

    def _pending(self, last: _FinishedStep, seconds: Callable[[], Seconds]) -> Callable[[], Record]:
        """Return a function that completes the record at the next step: the GPU still computes some of its numbers."""
        record: Record = {"step": last.step, "total": last.total, "learning_rate": last.rate, "time": last.time}
        if self._corpora:
            record[CORPORA] = {name: count for read in self._corpora for name, count in read().items()}
        late, steps = DeferredScalar(last.loss), self._steps
        norm = None if last.norm is None else DeferredScalar(last.norm)
        examples = DeferredScalar(self._examples) if isinstance(self._examples, Tensor) else None
        found = self.extras.take_tokens()
        tokens = DeferredScalar(found) if isinstance(found, Tensor) else found
        count, elapsed = self._examples, last.at - self._since
        self._examples, self._since = 0.0, last.at

        def complete() -> Record:
            record["loss"] = late.read()
            if norm is not None:
                record["gradient_norm"] = norm.read()
            if count is None:
                record["steps_per_s"] = steps / elapsed
            else:
                record["examples_per_s"] = (examples.read() if examples else float(count)) / elapsed
            if tokens:
                record["tokens_per_s"] = (tokens if isinstance(tokens, float) else tokens.read()) / elapsed
            if (least := self._peak_seconds()) is not None:
                record["mfu"] = least * steps / elapsed
            return record | {phase: 1e3 * spent / steps for phase, spent in seconds().items()}

        return complete

    def _flush(self) -> None:
        if self._figures is not None:
            self._figures.flush()
        if self._due is not None:
            record, self._due = self._due(), None
            for sink in (*self._open_lines(), *self._open()):
                sink.write(record)

    def note(self, record: Record) -> None:
        """Write a record of another kind, such as an evaluation, to files and trackers."""
        if self._speaks:
            record = {"time": time.time(), **record}
            for sink in self._open():
                sink.write(record)

    def log(self, step: int, values: Mapping[str, Any], reduce: str | None = "mean") -> None:
        """Take the script's own numbers, which are written when they are merged over ranks."""
        self._numbers.add(step, values, reduce)
        if values:
            self._merge.logged()

    def _write_logged(self, merged: Merged) -> None:
        for step, values in merged.items():
            if self._log.console and self._log.lines:
                print(f"step {step}  " + "  ".join(f"{name} {value:.6g}" for name, value in values.items()), flush=True)
            self.note({"step": step, LOGGED: values})

    def close(self, error: BaseException | None = None) -> None:
        """Close the sinks, after a record of the steps since the last one.

        After an ``error`` these steps are not written, because the device may never finish.
        """
        self._flush()
        if self._last is not None and error is None:
            self._take(self._last)
            if self._due is not None:
                self.note(self._due())
        self._merge.close(failed=error is not None)
        if self._figures is not None:
            self._figures.close()
        for sink in (*self._lines, *(self._sinks or [])):
            sink.close(failed=error is not None)
        self._sinks, self._lines = None, []

    def _open(self) -> list[Sink]:
        """Return the sinks of all records; open them if they are not open."""
        if self._sinks is None:
            self._sinks = self._open_files()
        return self._sinks

    def _open_lines(self) -> list[Sink]:
        """Return the sinks of the console; open them if they are not open."""
        if not self._lines and self._log.console and self._log.lines:
            bar = self._log.progress if self._log.progress is not None else _terminal()
            self._lines = [ProgressBarSink() if bar else ConsoleSink()]
        return self._lines


def _directory(log: Log) -> Path | None:
    path = Path(log.dir) if log.dir else launcher_run_directory()
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the log directory '{path}' cannot be made: {error.strerror}; choose another") from None
    return path


def _figures(directory: Path | None, rank: int, device: torch.device) -> RankFigures | None:
    from echelon.observability.runlog.rank_log import RankFigures

    return RankFigures(directory, rank, device) if directory is not None else None


def _terminal() -> bool:
    return sys.__stdout__ is not None and sys.__stdout__.isatty()
