"""``rank-N.jsonl.part``: what a rank has recorded so far, as it writes it down while it records.

First the line about the rank, as in the whole file. Then at the end of each step one line with its spans, each an array
of a span's fields, on the rank's own clock: a fifth of the time that objects take. A line that is an object tells what
the rank is in the middle of. The last line may be cut anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from echelon.observability.trace.span import Span, span_of


class TraceTruncation(NamedTuple):
    """The end of a recording that was cut short.

    at:    the last moment that is known of the rank, on the clock of all
    doing: what it was in the middle of: the phase first, then what it waited for inside it
    said:  its own word on the end, "" where the run was simply over; None: it had no time for one
    lost:  it ended because another rank was gone
    """

    at: float
    doing: tuple[Span, ...] = ()
    said: str | None = None
    lost: bool = False


# ---- writing ----


def spans_line(spans: Iterable[Span]) -> str:
    return json.dumps([_row(span) for span in spans]) + "\n"


def now_line(at: float, under_way: Iterable[Span], said: str | None = None, lost: bool = False) -> str:
    told: dict[str, Any] = {"at": at, "under_way": [_row(span) for span in under_way]}
    if said is not None:
        told |= {"said": said, "lost": lost}
    return json.dumps(told) + "\n"


def _row(span: Span) -> tuple[Any, ...]:
    return (*span[:-1], dict(span.more))


# ---- reading ----


def read_part(about: dict[str, Any], lines: Iterable[Any]) -> tuple[list[Span], TraceTruncation]:
    """The spans and the end of what the parsed ``lines`` tell, on the clock of all; what is no such line is left out.

    What was under way at the end is among the spans, as far as it had come.
    """
    spans: list[Span] = []
    last: dict[str, Any] = {}
    for line in lines:
        if isinstance(line, list):
            spans += _spans(line)
            last = {}  # it has gone on since
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
    """Of those recorded: the update is a step's last phase."""
    return max((span.step for span in spans if span.name == "update" and "phase" in span.more), default=None)
