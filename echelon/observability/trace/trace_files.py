"""A recording's files: ``timeline/rank-N.jsonl``, one line about the rank and then one a span.

While a rank records it has ``rank-N.jsonl.part`` in its place (see ``part``), and so has one that did not come to the
end. Whatever cannot be read is left out: a run may have been killed while it wrote.
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
from echelon.observability.runlog.run_directory import existing_directory, records_elsewhere
from echelon.observability.trace.partial_file import TraceTruncation, read_part
from echelon.observability.trace.span import Span, span_of

FOLDER, TRACE, SUMMARY = "timeline", "trace.json.gz", "summary.json"
#: Where the parts go that an earlier attempt left: it is looked into when it is known why a run crashes.
UNFINISHED = "unfinished"
_OURS = re.compile(r"rank-(\d{1,7})\.jsonl(\.part)?")


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. ``about`` is the first line: rank, host, clock_offset, clock_error, device, steps ...
    ``ending`` is there where the recording was cut short."""

    rank: int
    about: dict[str, Any]
    spans: Sequence[Span] = field(default_factory=list)
    ending: TraceTruncation | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Replica, stage, split: ranks of one pipeline differ in the second alone."""
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
    """Aside, then renamed: a reader never sees half of it."""
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
    """For this rank's next recording. What an earlier one left would pass for a part of it; a part is kept aside."""
    (folder / rank_file_name(rank)).unlink(missing_ok=True)
    part, aside = folder / part_name(rank), folder / UNFINISHED / part_name(rank)
    if part.exists():
        aside.parent.mkdir(exist_ok=True)
        part.replace(aside)
    else:
        aside.unlink(missing_ok=True)


def forget(folder: Path, beyond: int) -> None:
    """What was made of an earlier recording, and what more ranks than there are now have left."""
    for place in (folder, folder / UNFINISHED):
        for rank, path in _rank_files(place):
            if rank >= beyond:
                path.unlink(missing_ok=True)
        for name in (TRACE, SUMMARY):
            (place / name).unlink(missing_ok=True)


def of_ranks(folder: Path) -> dict[int, Path]:
    """By rank, its file: the whole one where there is one."""
    parts_first = sorted(_rank_files(folder), key=lambda found: (found[0], found[1].suffix != ".part"))
    return dict(parts_first)


def _rank_files(folder: Path) -> list[tuple[int, Path]]:
    matched = ((_OURS.fullmatch(path.name), path) for path in folder.glob("rank-*"))
    # a pipe or a device by such a name would have no end
    return [(int(match[1]), path) for match, path in matched if match is not None and path.is_file()]


def find(directory: str | Path) -> Path:
    """The folder of the newest recording in a run's directory; the folder itself may be given, too."""
    path = existing_directory(directory)
    for folder in (path / FOLDER, *sorted((path / FOLDER).glob("step-*"), reverse=True), path):
        if folder.is_dir() and any(_reads(file) for file in of_ranks(folder).values()):
            return folder
    other = records_elsewhere(directory)
    remedy = f"this run has written to '{other}'" if other else "record one by 'echelon run --timeline ...'"
    raise UsageError(f"there is no timeline in '{directory}'; {remedy}")


def recorded_at(folder: Path) -> float | None:
    """When a recording began, as far as its ranks say so."""
    times = []
    for file in of_ranks(folder).values():
        with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
            about = _json(next(lines, ""))
            if isinstance(about, dict) and isinstance(began := about.get("began"), int | float):
                times.append(float(began))
    return max(times, default=None)


def _reads(file: Path) -> bool:
    """Whether it is one of ours: the run's directory has files of the same name for other things."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return _is_ours(_json(next(lines, "")))
    except OSError:
        return False


def _is_ours(about: Any) -> bool:
    return isinstance(about, dict) and isinstance(about.get("rank"), int) and "clock_offset" in about


def read(folder: Path) -> list[RankTrace]:
    """By rank."""
    return [ranked for file in of_ranks(folder).values() if (ranked := read_rank(file)) is not None]


def read_rank(file: Path) -> RankTrace | None:
    """What one rank left; None where the file is none of ours."""
    try:
        first, *lines = file.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    except OSError:
        return None
    about: Any = _json(first)
    if not _is_ours(about):
        return None
    told = map(_json, lines)
    if file.suffix == ".part":
        return RankTrace(about["rank"], about, *read_part(about, told))
    return RankTrace(about["rank"], about, [span for line in told if (span := span_of(line)) is not None])


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
