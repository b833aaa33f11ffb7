"""Where records go: a console line, a live bar, JSON lines, TensorBoard. Each takes a record and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Protocol

from echelon.errors import UsageError
from echelon.watch.clock import PHASES

Record = dict[str, Any]


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One plain line a record, for logs and pipes."""

    def write(self, record: Record) -> None:
        print(summary(record), flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A live progress bar on the terminal; the plain lines still reach the rank's log file."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(file=sys.__stdout__),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tee = getattr(sys.stdout, "console", None)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()
        if self._tee is not None:
            self._terminal = self._tee.swap(lambda text: self._progress.console.out(text, end="", highlight=False))

    def write(self, record: Record) -> None:
        text = f"loss {record['loss']:.4f}  {record['examples_per_s']:,.0f} examples/s"
        self._progress.update(self._task, completed=record["step"], total=record.get("total"), description=text)
        if self._tee is not None:
            self._tee.log_only(summary(record) + "\n")

    def close(self) -> None:
        self._progress.stop()
        if self._tee is not None:
            self._tee.swap(self._terminal)


class JsonLines:
    """metrics.jsonl: one object a record."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "metrics.jsonl").open("a", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard; needs the `tensorboard` extra."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "Log(tensorboard=True) needs the tensorboard package, which is not installed; "
                "pip install 'echelon[tensorboard]', or leave it off"
            ) from None
        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("step", "total", "time") and isinstance(value, int | float):
                group = "milliseconds" if name in PHASES else "train"
                self._writer.add_scalar(f"{group}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


def summary(record: Record) -> str:
    """``step 120/1400  loss 0.2131  5,120 examples/s  data 1.2 forward 20.1 ... ms``"""
    total = f"/{record['total']}" if record.get("total") else ""
    phases = " ".join(f"{phase} {record[phase]:.1f}" for phase in PHASES if phase in record)
    return (
        f"step {record['step']}{total}  loss {record['loss']:.4f}  {record['examples_per_s']:,.0f} examples/s  "
        f"{phases} ms"
    )
