"""``echelon timeline DIR``, and what the launcher says at the end of a job that recorded."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from echelon.errors import EchelonError
from echelon.timeline import files
from echelon.timeline.merge import merge
from echelon.timeline.show import text
from echelon.timeline.show_cut import headline
from echelon.timeline.summary import Summary


def summary_of(directory: str | Path) -> Summary:
    """Of the newest recording in a run's directory. Trace and summary are written beside it, where they may be."""
    folder = files.find(directory)
    try:
        return merge(folder)
    except EchelonError:  # somebody else's directory
        return merge(folder, keep=False)


def timeline_words(directory: str, as_json: bool) -> str:
    summary = summary_of(directory)
    return json.dumps(summary.figures, indent=1) if as_json else text(summary)


def conclude(directory: Path | None) -> list[str]:
    """What ranks that do not meet have recorded, or a job has left that failed, put together; nothing where rank 0 has
    done so already."""
    with contextlib.suppress(EchelonError):
        if directory is None:
            return []
        folder = files.find(directory)
        if not (folder / files.TRACE).exists():
            summary = merge(folder)
            if (cut := summary.figures["cut"]) is None:
                return summary.lines()
            return [f"timeline: {headline(cut)}", f"timeline: 'echelon timeline {directory}' shows how far each came"]
    return []
