"""Sinks for metrics records: console lines, a progress bar, JSON lines, TensorBoard and trackers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

from echelon.observability.metrics.trackers import Record, named_numbers
from echelon.observability.runlog.log_files import LOGGED, METRICS
from echelon.observability.runlog.log_files import JsonLinesFile as JsonFile
from echelon.observability.runlog.step_phases import BETWEEN, PHASES


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self, failed: bool = False) -> None: ...


class ConsoleSink:
    """Prints one plain line per record, for logs and pipes."""

    def write(self, record: Record) -> None:
        print(summary(record), flush=True)

    def close(self, failed: bool = False) -> None:
        pass


class ProgressBarSink:
    """A progress bar on the terminal. Output of the script appears above it; the rank's log gets plain lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._tees = [tee for stream in (sys.stdout, sys.stderr) if (tee := _tee_of(stream)) is not None]
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(file=sys.__stdout__),
            redirect_stdout=not self._tees,
            redirect_stderr=not self._tees,
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()
        for tee in self._tees:
            tee.show = self._above

    def write(self, record: Record) -> None:
        text = f"loss {record['loss']:.4f}  {speed(record)}"
        self._progress.update(self._task, completed=record["step"], total=record.get("total"), description=text)
        for tee in self._tees[:1]:
            tee.log.write(f"{summary(record)}\n".encode())

    def close(self, failed: bool = False) -> None:
        for tee in self._tees:
            tee.restore()
        self._progress.stop()

    def _above(self, data: bytes) -> None:
        self._progress.console.out(data.decode(errors="replace"), end="", highlight=False)


class JsonLinesSink:
    """Writes metrics.jsonl, with one JSON object per record."""

    def __init__(self, directory: Path) -> None:
        self._lines = JsonFile(directory / METRICS)

    def write(self, record: Record) -> None:
        self._lines.write(record)

    def close(self, failed: bool = False) -> None:
        self._lines.close()


def find_event_writer() -> Any:
    """Return torch's writer of TensorBoard files; None if the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter


class TensorBoardSink:
    """Writes event files for TensorBoard; needs the `tensorboard` extra."""

    def __init__(self, directory: Path, event_writer: Any) -> None:
        self._writer: Any = event_writer(str(directory / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in named_numbers(record, f"{LOGGED}/").items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, failed: bool = False) -> None:
        self._writer.close()


def _tee_of(stream: object) -> Any:
    """Return the launcher's tee behind a standard stream of rank 0, or None."""
    tee = getattr(stream, "buffer", None)
    return tee if hasattr(tee, "show") else None


def summary(record: Record) -> str:
    """Format a record: ``step 120/1400  loss 0.2131  5,120 examples/s  data 1.2 forward 20.1 ... ms``."""
    total = f"/{record['total']}" if record.get("total") else ""
    phases = " ".join(f"{phase} {record[phase]:.1f}" for phase in (*PHASES, *BETWEEN) if phase in record)
    norm = f"norm {record['gradient_norm']:.4g}  " if "gradient_norm" in record else ""
    return f"step {record['step']}{total}  loss {record['loss']:.4f}  {norm}{speed(record)}  {phases} ms"


def speed(record: Record) -> str:
    """Format examples per second, or steps if the number of examples is unknown; tokens and MFU if they are known."""
    examples = f"{record['examples_per_s']:,.0f} examples/s" if "examples_per_s" in record else None
    shown = [examples or f"{record['steps_per_s']:,.1f} steps/s"]
    if "tokens_per_s" in record:
        shown.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in record:
        shown.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(shown)
