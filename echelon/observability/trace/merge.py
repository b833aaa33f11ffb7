"""Merges the ranks' files into one trace and one summary."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.observability.trace import trace_files
from echelon.observability.trace.partial_file import last_whole_step
from echelon.observability.trace.perfetto import trace_of
from echelon.observability.trace.summary import Summary, read_flops, summarize
from echelon.observability.trace.trace_files import RankTrace
from echelon.observability.trace.truncated import find_earlier_parts, find_truncation


def merge(folder: Path, *, keep: bool = True) -> Summary:
    """Return the summary of the ranks' files.

    keep: True (default) to write trace and summary next to them, unless ranks are still recording
    """
    ranks = on_one_clock(trace_files.read(folder))
    cut = find_truncation(ranks, folder)
    figures = {**summarize([whole_steps(ranked) for ranked in ranks], read_flops(folder.parent)), "cut": cut}
    if keep and not (cut and cut["running"]):
        trace = json.dumps(trace_of(ranks)).encode()
        trace_files.write(folder, trace_files.TRACE, gzip.compress(trace, compresslevel=3, mtime=0))
        trace_files.write(folder, trace_files.SUMMARY, json.dumps(figures, indent=1).encode())
    there = folder / trace_files.TRACE
    return Summary(figures, there if there.exists() else None, find_earlier_parts(folder))


def whole_steps(ranked: RankTrace) -> RankTrace:
    """Drop an incomplete last step, which would count as a fast one."""
    if ranked.ending is None:
        return ranked
    last = last_whole_step(ranked.spans)
    return replace(ranked, spans=[span for span in ranked.spans if last is not None and span.step <= last])


def on_one_clock(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Shift ranks of other hosts to the first rank's clock by wall-clock time if their clock offsets are unknown."""
    if not ranks:
        return []
    first = ranks[0]
    return [first, *(_shifted(ranked, first) for ranked in ranks[1:])]


def _shifted(ranked: RankTrace, first: RankTrace) -> RankTrace:
    walls = ranked.about.get("wall"), first.about.get("wall")
    same_host = ranked.about.get("host") == first.about.get("host")
    if ranked.about.get("clock_error") is not None or same_host or not all(isinstance(w, float) for w in walls):
        return ranked
    shift = float(walls[0]) - float(walls[1])  # type: ignore[arg-type]
    return replace(ranked, spans=[span.moved(lambda at: at + shift) for span in ranked.spans])
