"""Format of ``rank-N.jsonl.part``, the file that a rank writes during a trace.

The first line describes the rank, as in the complete file. Then each step has one line with its spans, on the rank's
own clock. Each span is an array of its fields, which takes a fifth of the time of objects. A line that is an object
describes the current activity of the rank. The last line may be truncated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from echelon.observability.trace.span import Span, span_of


class TraceTruncation(NamedTuple):
    """The end of a trace that was cut short.

    at:    time of the rank's last sign of life, on the common clock
    doing: unfinished spans: the phase first, then the waits inside it
    said:  the rank's last message; "" if the run simply ended; None if the rank could not write one
    lost:  True if it ended because another rank was lost
    """

    at: float
    doing: tuple[Span, ...] = ()
    said: str | None = None
    lost: bool = False


# ---- writing ----


def spans_line(spans: Iterable[Span]) -> str:
    return json.dumps([_row(span) for span in spans]) + "\n"


def now_line(at: float, under_way: Iterable[Span], said: str | None = None, lost: bool = False) -> str:
    record: dict[str, Any] = {"at": at, "under_way": [_row(span) for span in under_way]}
    if said is not None:
        record |= {"said": said, "lost": lost}
    return json.dumps(record) + "\n"


def _row(span: Span) -> tuple[Any, ...]:
    return (*span[:-1], dict(span.more))


# ---- reading ----


def read_part(about: dict[str, Any], lines: Iterable[Any]) -> tuple[list[Span], TraceTruncation]:
    """Return the spans and the end of a partial file on the common clock; other ``lines`` are skipped.

    Unfinished spans are included, up to the last known time.
    """
    spans: list[Span] = []
    last: dict[str, Any] = {}
    for line in lines:
        if isinstance(line, list):
            spans += _spans(line)
            last = {}  # the rank has continued since then
        elif isinstance(line, dict) and isinstance(line.get("at"), float):
            last = line
    cut = [span._replace(more={**span.more, "cut": True}) for span in _spans(last.get("under_way"))]
    seconds = about.get("clock_offset")
    offset = float(seconds) if isinstance(seconds, int | float) else 0.0  # measured once, before the recording
    moved = [span.moved(lambda at: at + offset) for span in (*spans, *cut)]
    at = last["at"] + offset if last else max((span.end for span in moved), default=0.0)
    said = last.get("said")
    doing = tuple(span for span in moved if "cut" in span.more)
    ending = TraceTruncation(at, doing, said if isinstance(said, str) else None, last.get("lost") is True)
    return sorted(moved, key=lambda span: (span.begin, -span.end)), ending


def _spans(rows: Any) -> list[Span]:
    rows = rows if isinstance(rows, list) else []
    return [span for row in rows if (span := _span(row)) is not None]


def _span(row: Any) -> Span | None:
    fields = Span._fields
    if not isinstance(row, list) or len(row) != len(fields) or not isinstance(row[-1], dict):
        return None
    return span_of({**row[-1], **dict(zip(fields[:-1], row, strict=False))})


def last_whole_step(spans: Sequence[Span]) -> int | None:
    """Return the last complete step, whose update was recorded; None if there is none."""
    return max((span.step for span in spans if span.name == "update" and "phase" in span.more), default=None)
