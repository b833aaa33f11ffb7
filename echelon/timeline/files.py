"""A recording's files: ``timeline/rank-N.jsonl``, one line about the rank and then one a span.

Whatever cannot be read is left out: a run may have been killed while it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import UsageError
from echelon.timeline.span import Span, span_of

FOLDER, TRACE, SUMMARY = "timeline", "trace.json.gz", "summary.json"


@dataclass(frozen=True)
class RankFile:
    """What one rank recorded. ``about`` is the first line: rank, host, clock_offset, clock_error, device, steps ..."""

    rank: int
    about: dict[str, Any]
    spans: Sequence[Span] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int, int]:
        """Replica, stage, split: ranks of one pipeline differ in the second alone."""
        at = self.about.get("at")
        at = at if isinstance(at, dict) else {}
        replica, stage, split = (at.get(axis) for axis in ("replicate", "stage", "split"))
        return _number(replica), _number(stage), _number(split)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def lines_of(about: dict[str, Any], spans: Iterable[Span]) -> str:
    told = [about, *(span.to_json() for span in sorted(spans, key=lambda span: (span.begin, -span.end)))]
    return "".join(json.dumps(line) + "\n" for line in told)


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


def forget(folder: Path, beyond: int) -> None:
    """What an earlier recording left would pass for a part of this one."""
    for old in folder.glob("rank-*.jsonl"):
        number = old.stem.removeprefix("rank-")
        if number.isdigit() and int(number) >= beyond:
            old.unlink(missing_ok=True)
    for name in (TRACE, SUMMARY):
        (folder / name).unlink(missing_ok=True)


def find(directory: str | Path) -> Path:
    """The folder of the newest recording in a run's directory; the folder itself may be given, too."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"there is no directory '{directory}'; give the run's log directory")
    for folder in (path / FOLDER, *sorted((path / FOLDER).glob("step-*"), reverse=True), path):
        if folder.is_dir() and any(_reads(file) for file in folder.glob("rank-*.jsonl")):
            return folder
    raise UsageError(f"there is no timeline in '{directory}'; record one by 'echelon run --timeline ...'")


def _reads(file: Path) -> bool:
    """Whether it is one of ours: the run's directory has files of the same name for other things."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return _is_ours(_json(next(lines, "")))
    except OSError:
        return False


def _is_ours(about: Any) -> bool:
    return isinstance(about, dict) and isinstance(about.get("rank"), int) and "clock_offset" in about


def read(folder: Path) -> list[RankFile]:
    """By rank."""
    found = [ranked for file in folder.glob("rank-*.jsonl") if (ranked := _rank_file(file)) is not None]
    return sorted(found, key=lambda ranked: ranked.rank)


def _rank_file(file: Path) -> RankFile | None:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    about: Any = _json(lines[0]) if lines else None
    if not _is_ours(about):
        return None
    spans = [span for line in lines[1:] if (span := span_of(_json(line))) is not None]
    return RankFile(about["rank"], about, spans)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
