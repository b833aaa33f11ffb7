"""The report of ``echelon timeline DIR``, and the launcher's lines at the end of a job with a trace."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from echelon.base.errors import EchelonError
from echelon.observability.runlog.log_files import RUN
from echelon.observability.runlog.run_directory import records_of
from echelon.observability.runlog.tolerant_json import json_file, number
from echelon.observability.trace import trace_files
from echelon.observability.trace.merge import merge
from echelon.observability.trace.summary import Summary
from echelon.observability.trace.summary_text import text
from echelon.observability.trace.truncated_text import headline


def summary_of(directory: str | Path) -> Summary:
    """Return the summary of the newest trace in a run's directory; write trace and summary there if possible."""
    folder = trace_files.find(directory)
    try:
        return merge(folder)
    except EchelonError:  # the directory is not writable
        return merge(folder, keep=False)


def timeline_words(directory: str, as_json: bool) -> str:
    summary = summary_of(directory)
    if as_json:
        return json.dumps(summary.figures, indent=1)
    earlier = "an earlier run recorded this; the newest one in this directory recorded nothing\n\n"
    return (earlier if _is_of_an_earlier_run(Path(directory)) else "") + text(summary)


def _is_of_an_earlier_run(directory: Path) -> bool:
    facts = json_file(records_of(directory) / RUN)
    began = number(facts, "began") if facts is not None else None
    recorded = trace_files.recorded_at(trace_files.find(directory))
    return began is not None and recorded is not None and recorded < began


def conclude(directory: Path | None) -> list[str]:
    """Merge the trace of workers without a common process group, or of a failed job, and return log lines.

    The result is empty if rank 0 has merged the trace already.
    """
    with contextlib.suppress(EchelonError):
        if directory is None:
            return []
        folder = trace_files.find(directory)
        if not (folder / trace_files.TRACE).exists():
            summary = merge(folder)
            if (cut := summary.figures["cut"]) is None:
                return summary.lines()
            how = f"timeline: 'echelon timeline {directory}' shows the last step of each rank"
            return [f"timeline: {headline(cut)}", how]
    return []
