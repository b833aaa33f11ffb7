"""Reads the files of a run's directory once: the run log and the timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from echelon.base.errors import EchelonError
from echelon.observability.runlog.run_directory import records_of
from echelon.observability.runlog.run_reader import Run, read
from echelon.observability.runlog.tolerant_json import JSON, LARGEST, json_file, json_value
from echelon.observability.trace import trace_files
from echelon.observability.trace.merge import merge
from echelon.observability.trace.span import DEVICE, KINDS, Span, span_of

#: Largest gap in seconds between two kernels of one phase that are drawn as one.
TOGETHER = 50e-6


@dataclass(frozen=True)
class RunFiles:
    """The data of a run's directory.

    spans:   timeline of each rank, with successive kernels of one phase joined
    summary: figures of ``echelon timeline``
    trace:   merged trace for Perfetto; None without one
    """

    run: Run
    spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    summary: JSON = field(default_factory=dict)
    trace: Path | None = None


def gather(directory: Path) -> RunFiles:
    """Read the run of a directory, or that of a launcher's log directory which has written its log elsewhere."""
    directory = records_of(directory)
    run = read(directory)
    try:
        folder = trace_files.find(directory)
    except EchelonError:
        return RunFiles(run)
    if run.facts is not None and (trace_files.recorded_at(folder) or run.facts.began) < run.facts.began:
        return RunFiles(run)  # the timeline is of an earlier run in the same directory
    trace = folder / trace_files.TRACE
    return RunFiles(run, _spans(folder), _summary(folder), trace if trace.is_file() else None)


def signature(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and modification times of all files read, which change when a file is written."""
    found = []
    directory = records_of(directory)
    for path in [*directory.glob("*.json*"), *(directory / trace_files.FOLDER).glob("**/*.json*")]:
        try:
            seen = path.stat()
        except OSError:  # the file was renamed or removed meanwhile
            continue
        found.append((str(path), seen.st_size, seen.st_mtime_ns))
    return tuple(sorted(found))


def _summary(folder: Path) -> JSON:
    found = json_file(folder / trace_files.SUMMARY)
    if found is None:
        with contextlib.suppress(EchelonError):
            found = merge(folder, keep=False).figures
    return found or {}


def _spans(folder: Path) -> dict[int, tuple[Span, ...]]:
    found = trace_files.of_ranks(folder)
    return {rank: spans for rank, path in found.items() if (spans := tuple(_joined(_of_rank(path))))}


def _of_rank(path: Path) -> Iterator[Span]:
    """Yield the valid spans of a rank's file. A finished file is read by line, because GPU kernels make it long."""
    if path.suffix == ".part":
        ranked = trace_files.read_rank(path)
        yield from filter(_sane, ranked.spans if ranked is not None else ())
        return
    with contextlib.suppress(OSError), path.open("rb") as lines:
        for line in lines:
            if (span := span_of(json_value(line))) is not None and _sane(span):
                yield span


def _sane(span: Span) -> bool:
    return -LARGEST < span.begin <= span.end < LARGEST and not (span.bytes or 0) >= LARGEST


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Yield the spans with successive kernels joined by launching phase, because there may be thousands of kernels."""
    held: Span | None = None
    for span in spans:
        if span.kind != "kernel":
            yield span
            continue
        kind = _launched_in(span)
        if held is not None and (held.kind, held.step) == (kind, span.step) and span.begin - held.end <= TOGETHER:
            held = _kernels(kind, held.begin, max(held.end, span.end), span.step)
            continue
        if held is not None:
            yield held
        held = _kernels(kind, span.begin, span.end, span.step)
    if held is not None:
        yield held


def _launched_in(kernel: Span) -> str:
    phase = kernel.more.get("in")
    return phase if phase in KINDS else "other"


def _kernels(kind: str, begin: float, end: float, step: int) -> Span:
    return Span("kernels", kind, DEVICE, begin, end, step)
