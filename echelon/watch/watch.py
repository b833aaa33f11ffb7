"""Watch: gathers what each step reports and hands a record to the sinks every few steps."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.record.files import surroundings
from echelon.watch.clock import Seconds, make_clock
from echelon.watch.foretold import Foretold
from echelon.watch.late import Late
from echelon.watch.log import Log
from echelon.watch.sinks import Bar, JsonLines, Lines, Record, Sink, TensorBoard

if TYPE_CHECKING:
    from echelon.record.ranks import RankFigures


class Watch:
    """Rank 0's eyes; on the other ranks it keeps the clock and that rank's own figures."""

    def __init__(self, log: Log, device: torch.device, rank: int) -> None:
        self.clock = make_clock(device)
        self._device = device
        self._foretold: Foretold | None = None
        self._every, self._log = log.every, log
        self._speaks = rank == 0
        self._sinks: list[Sink] | None = None
        self._due: Callable[[], Record] | None = None
        self._steps = 0
        self._examples: Tensor | float = 0.0
        self._since = time.perf_counter()
        self.directory = _directory(log)
        self._figures = _figures(self.directory, rank, device)

    def say(self, text: str) -> None:
        """A line from rank 0, outside the stream of records."""
        if self._speaks and self._log.console:
            print(f"echelon: {text}", flush=True)

    def foretell(self, seconds: float, memory: float, held: float) -> None:
        """What a step is to take, and to hold on this device; after some steps, what came is set against it.

        held: bytes of the model that are there already. What it took to find the plan is no part of a step."""
        if self._speaks:
            self._foretold = Foretold(seconds, memory, held, self._device)
        self.clock.lap("data")
        self.clock.take()
        self._since = time.perf_counter()

    def step(self, step: int, loss: Tensor, examples: Tensor | float, rate: float, total: int | None) -> None:
        """Note a finished step; every few of them, write a record."""
        if self._due is not None or self._figures is not None:
            self._flush()
        self._steps += 1
        if not self._speaks:
            if step % self._every == 0 or step == total:
                self._note_own(step, self.clock.take())  # also where nobody reads it: it would grow
                self._steps = 0
            return
        if self._foretold is not None and (came := self._foretold.step()) is not None:
            self._foretold = None
            self.say(came.line)
            self.note({"step": step, **came.record})
        self._examples = self._examples + examples
        if step % self._every and step != total:
            return
        record: Record = {"step": step, "total": total, "learning_rate": rate, "time": time.time()}
        self._due = self._pending(record, loss)
        if not loss.is_cuda or step == total:
            self._flush()

    def _pending(self, record: Record, loss: Tensor) -> Callable[[], Record]:
        """The rest of the record is still on its way through the GPU; it is read at the next step."""
        late, seconds, steps = Late(loss), functools.cache(self.clock.take()), self._steps
        self._note_own(record["step"], seconds)
        examples = Late(self._examples) if isinstance(self._examples, Tensor) else None
        count, elapsed = self._examples, time.perf_counter() - self._since
        self._steps, self._examples, self._since = 0, 0.0, time.perf_counter()

        def complete() -> Record:
            record["loss"] = late.read()
            record["examples_per_s"] = (examples.read() if examples else float(count)) / elapsed
            return record | {phase: 1e3 * spent / steps for phase, spent in seconds().items()}

        return complete

    def _note_own(self, step: int, seconds: Callable[[], Seconds]) -> None:
        if self._figures is not None:
            self._figures.take(step, self._steps, seconds)

    def _flush(self) -> None:
        if self._figures is not None:
            self._figures.flush()
        if self._due is not None:
            record, self._due = self._due(), None
            for sink in self._open():
                sink.write(record)

    def note(self, record: Record) -> None:
        """A record of another kind (an evaluation) for the files."""
        if self._speaks:
            for sink in self._open():
                if isinstance(sink, JsonLines | TensorBoard):
                    sink.write({"time": time.time(), **record})

    def close(self) -> None:
        self._flush()
        if self._figures is not None:
            self._figures.close()
        for sink in self._sinks or []:
            sink.close()
        self._sinks = None

    def _open(self) -> list[Sink]:
        if self._sinks is None:
            self._sinks = []
            if self._log.console and self._log.lines:
                bar = self._log.progress if self._log.progress is not None else _terminal()
                self._sinks.append(Bar() if bar else Lines())
            if self.directory is not None:
                self._sinks.append(JsonLines(self.directory))
                if self._log.tensorboard:
                    self._sinks.append(TensorBoard(self.directory))
        return self._sinks


def _directory(log: Log) -> Path | None:
    path = Path(log.dir) if log.dir else surroundings()
    if path is None:
        if log.tensorboard:
            raise UsageError("Log(tensorboard=True) needs a place to write: give Log(dir=...), or use 'echelon run'")
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the log directory '{path}' cannot be made: {error.strerror}; choose another") from None
    return path


def _figures(directory: Path | None, rank: int, device: torch.device) -> RankFigures | None:
    from echelon.record.ranks import RankFigures  # it reads what this room keeps, so it comes after it

    return RankFigures(directory, rank, device) if directory is not None else None


def _terminal() -> bool:
    return sys.__stdout__ is not None and sys.__stdout__.isatty()
