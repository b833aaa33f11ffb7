"""Reads and writes the files of a trace: ``timeline/rank-N.jsonl`` has one line on the rank, then one line per span.

During the trace, and if it was cut short, a rank has ``rank-N.jsonl.part`` instead (see ``partial_file``). Unreadable
lines are skipped, because a run may have been killed while it wrote.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.observability.runlog.run_directory import existing_directory, records_of
from echelon.observability.runlog.tolerant_json import json_value
from echelon.observability.trace.partial_file import TraceTruncation, read_part
from echelon.observability.trace.span import Span, span_of

FOLDER, TRACE, SUMMARY = "timeline", "trace.json.gz", "summary.json"
#: Directory for the partial files of an earlier attempt, which help to find out why a run crashes.
UNFINISHED = "unfinished"
_OURS = re.compile(r"rank-(\d{1,7})\.jsonl(\.part)?")


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    about:  first line of its file: rank, host, clock_offset, clock_error, device, steps and more
    ending: end of a trace that was cut short; None otherwise
    """

    rank: int
    about: dict[str, Any]
    spans: Sequence[Span] = field(default_factory=list)
    ending: TraceTruncation | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Replica, stage and split index; ranks of one pipeline differ only in the stage."""
        at = self.about.get("at")
        at = at if isinstance(at, dict) else {}
        replica, stage, split = (at.get(axis) for axis in ("replicate", "stage", "split"))
        return _number(replica), _number(stage), _number(split)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def first_line(about: dict[str, Any]) -> str:
    return json.dumps(about) + "\n"


def lines_of(about: dict[str, Any], spans: Iterable[Span]) -> str:
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    return first_line(about) + "".join(json.dumps(span.to_json()) + "\n" for span in ordered)


def write(folder: Path, name: str, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that a reader never sees an incomplete file.

    Raises ``UsageError`` if it cannot be written.
    """
    aside = folder / f".{name}.writing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(content)
        aside.rename(folder / name)
    except OSError as error:
        raise UsageError(
            f"'{folder / name}' cannot be written: {error.strerror}; choose another log directory"
        ) from None


def rank_file_name(rank: int) -> str:
    return f"rank-{rank}.jsonl"


def part_name(rank: int) -> str:
    return f"{rank_file_name(rank)}.part"


def make_way(folder: Path, rank: int) -> None:
    """Remove this rank's file of an earlier trace, and move its partial file to ``UNFINISHED``."""
    (folder / rank_file_name(rank)).unlink(missing_ok=True)
    part, aside = folder / part_name(rank), folder / UNFINISHED / part_name(rank)
    if part.exists():
        aside.parent.mkdir(exist_ok=True)
        part.replace(aside)
    else:
        aside.unlink(missing_ok=True)


def forget(folder: Path, beyond: int) -> None:
    """Remove the merged files of an earlier trace, and the files of ranks from ``beyond`` on."""
    for place in (folder, folder / UNFINISHED):
        for rank, path in _rank_files(place):
            if rank >= beyond:
                path.unlink(missing_ok=True)
        for name in (TRACE, SUMMARY):
            (place / name).unlink(missing_ok=True)


def of_ranks(folder: Path) -> dict[int, Path]:
    """Return the file of each rank; a complete file takes precedence over a partial one."""
    parts_first = sorted(_rank_files(folder), key=lambda found: (found[0], found[1].suffix != ".part"))
    return dict(parts_first)


def _rank_files(folder: Path) -> list[tuple[int, Path]]:
    matched = ((_OURS.fullmatch(path.name), path) for path in folder.glob("rank-*"))
    # reading a pipe or a device of such a name would not end
    return [(int(match[1]), path) for match, path in matched if match is not None and path.is_file()]


def find(directory: str | Path) -> Path:
    """Return the folder of the newest trace in a run's directory, or the folder itself if it is given.

    The directory may be the launcher's log directory of a run that has written its own log elsewhere.

    Raises ``UsageError`` if there is no trace.
    """
    path = existing_directory(directory)
    records = records_of(path)
    for place in dict.fromkeys((records, path)):
        for folder in (place / FOLDER, *sorted((place / FOLDER).glob("step-*"), reverse=True), place):
            if folder.is_dir() and any(_reads(file) for file in of_ranks(folder).values()):
                return folder
    other = f", and none in '{records}', where this run has written its log" if records != path else ""
    raise UsageError(f"there is no timeline in '{directory}'{other}; record one by 'echelon run --timeline ...'")


def recorded_at(folder: Path) -> float | None:
    """Return the start time of a trace in seconds since the epoch; None if unknown."""
    times = []
    for file in of_ranks(folder).values():
        with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
            about = json_value(next(lines, ""))
            if isinstance(about, dict) and isinstance(began := about.get("began"), int | float):
                times.append(float(began))
    return max(times, default=None)


def _reads(file: Path) -> bool:
    """Return True if the file is a rank's trace: the run's directory has other files of the same name."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return _is_ours(json_value(next(lines, "")))
    except OSError:
        return False


def _is_ours(about: Any) -> bool:
    return isinstance(about, dict) and isinstance(about.get("rank"), int) and "clock_offset" in about


def read(folder: Path) -> list[RankTrace]:
    """Read the traces of all ranks, in rank order."""
    return [ranked for file in of_ranks(folder).values() if (ranked := read_rank(file)) is not None]


def read_rank(file: Path) -> RankTrace | None:
    """Read the trace of one rank; return None if the file is not a trace."""
    try:
        first, *lines = file.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    except OSError:
        return None
    about: Any = json_value(first)
    if not _is_ours(about):
        return None
    parsed = map(json_value, lines)
    if file.suffix == ".part":
        return RankTrace(about["rank"], about, *read_part(about, parsed))
    return RankTrace(about["rank"], about, [span for line in parsed if (span := span_of(line)) is not None])
