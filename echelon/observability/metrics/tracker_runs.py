"""``TrackerRuns``: the ids of a run in its trackers, kept in the run's directory so that a restart continues there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echelon.observability.runlog.log_files import TRACKERS, write_whole
from echelon.observability.runlog.tolerant_json import JSON, json_file


class TrackerRuns:
    """The ids of one run.

    directory: directory of the run; None: ids are not kept
    continues: returns True if this process goes on with the run that the directory holds
    settings:  returns the settings of the run
    """

    def __init__(self, directory: Path | None, continues: Callable[[], bool], settings: Callable[[], JSON]) -> None:
        self._path = None if directory is None else directory / TRACKERS
        self._continues = continues
        self.settings = settings

    def earlier(self, tracker: str) -> str | None:
        """Return the id of the run that this one continues; None if it is a new one."""
        if self._path is None or not self._continues():
            return None
        found = (json_file(self._path) or {}).get(tracker)
        return found if isinstance(found, str) else None

    def keep(self, tracker: str, run_id: str) -> None:
        if self._path is not None:
            write_whole(self._path, {**(json_file(self._path) or {}), tracker: run_id})
