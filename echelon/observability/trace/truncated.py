"""Analyzes a trace that was cut short: the last step and activity of each rank, and the rank that stopped first.

Besides the traces it reads only the launcher's events and the process table.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.base.process_info import process_started
from echelon.observability.runlog.log_files import EVENTS
from echelon.observability.runlog.tolerant_json import JSON, integer, json_lines, number, text
from echelon.observability.trace.partial_file import TraceTruncation, last_whole_step
from echelon.observability.trace.trace_files import UNFINISHED, RankTrace

#: Seconds of silence before the others after which a rank counts as first; ranks write more often (``live_writer``).
SILENCE = 2.0
#: A process that started more than these seconds after the trace has reused the pid.
REUSED = 5.0


def find_truncation(ranks: Sequence[RankTrace], folder: Path | None = None) -> dict[str, Any] | None:
    """Return a description of a trace that was cut short, or None for a complete trace.

    asked:    first and last step to record
    running:  True if processes still run: the trace is not cut short, but under way
    ranks:    for each rank: ``step``, its last complete step (null: none); ``doing``, its activity at the end;
              ``said``, its last message ("": the run ended; null: it could not write one); ``silent_ms``, time from
              its last sign of life to the last one of any rank
    missing:  ranks of the job without a file
    first:    rank that stopped first; null if that is not certain
    because:  the launcher's text on the end; null without one
    """
    parts = [(ranked, ranked.ending) for ranked in ranks if ranked.ending is not None]
    if not parts:
        return None
    last = max(ending.at for _, ending in parts)
    failure = _failure(folder, parts)
    about = parts[0][0].about
    return {
        "asked": _pair(about.get("asked")),
        "running": any(_is_running(ranked) for ranked, _ in parts),
        "ranks": [_rank(ranked, ending, last) for ranked, ending in parts],
        "missing": _missing(ranks),
        "first": first if (first := integer(failure, "rank")) is not None else _first(parts),
        "because": text(failure, "text") or None,
    }


def _pair(value: Any) -> list[int] | None:
    known = isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) for one in value)
    return value if known else None


def _rank(ranked: RankTrace, ending: TraceTruncation, last: float) -> dict[str, Any]:
    return {
        "rank": ranked.rank,
        "step": last_whole_step(ranked.spans),
        "doing": [_doing(span) for span in ending.doing if span.lane == "host"],
        "said": ending.said,
        "silent_ms": 1e3 * (last - ending.at),
    }


def _doing(span: Any) -> dict[str, Any]:
    return {"name": span.name, "ms": 1e3 * span.seconds, "ranks": span.ranks, "step": span.step}


def _missing(ranks: Sequence[RankTrace]) -> list[int]:
    count = max((n for ranked in ranks if isinstance(n := ranked.about.get("ranks"), int)), default=0)
    return sorted(set(range(min(count, 1_000_000))) - {ranked.rank for ranked in ranks})


def _first(parts: Sequence[tuple[RankTrace, TraceTruncation]]) -> int | None:
    """Return the rank that stopped first; None if that is not certain.

    This is the first rank that failed on its own; else the only rank without a last message; else the rank that fell
    silent long before the others.
    """
    by_time = sorted(parts, key=lambda part: part[1].at)
    failed = [ranked.rank for ranked, end in by_time if end.said and not end.lost]
    if failed:
        return failed[0]
    wordless = [part for part in by_time if part[1].said is None]
    if len(wordless) == 1 and len(parts) > 1:
        return wordless[0][0].rank
    if len(wordless) > 1 and wordless[1][1].at - wordless[0][1].at > SILENCE:
        return wordless[0][0].rank
    return None


def _failure(folder: Path | None, parts: Sequence[tuple[RankTrace, TraceTruncation]]) -> JSON:
    """Return the first failure or restart in the run's events after the trace began; empty if there is none."""
    began = min((wall for ranked, _ in parts if (wall := number(ranked.about, "began")) is not None), default=None)
    if folder is None or began is None:
        return {}
    events = [event for place in (folder.parent, folder.parent.parent) for event in json_lines(place / EVENTS)]
    failures = (e for e in events if text(e, "kind") in ("failed", "restart") and (number(e, "time") or 0.0) >= began)
    return next(failures, {})


def _is_running(ranked: RankTrace) -> bool:
    pid = ranked.about.get("pid")
    if ranked.about.get("host") != platform.node() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        return True
    began, started = number(ranked.about, "began"), process_started(pid)
    return began is None or started is None or started <= began + REUSED


def find_earlier_parts(folder: Path) -> Path | None:
    """Return the directory with partial files of an earlier attempt; None if there are none."""
    aside = folder / UNFINISHED
    return aside if any(aside.glob("rank-*.part")) else None
