"""server-N.jsonl: rows, requests and traffic of a parameter server, about once a second while they change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echelon.base.poll_interval import PollInterval
from echelon.base.process_info import process_memory
from echelon.observability.runlog.log_files import JsonLinesFile, launcher_run_directory, server_file

if TYPE_CHECKING:
    from echelon.parameter_server.server.shard import ServerShard

#: Least seconds between two lines.
PERIOD = 1.0


class ServerLog:
    """The log file of one server.

    traffic: function that returns the bytes received and sent so far
    """

    def __init__(self, server: int, shard: ServerShard, traffic: Callable[[], tuple[int, int]]) -> None:
        directory = launcher_run_directory()
        self._lines = None if directory is None else JsonLinesFile(directory / server_file(server))
        self._shard, self._traffic = shard, traffic
        self._interval = PollInterval(PERIOD)
        self._before: dict[str, Any] = {}

    def write_if_due(self, last: bool = False) -> None:
        """Write a line if a second has passed and a figure has changed since the line before; ``last``: do not wait."""
        if self._lines is None or not self._shard.opened or not (last or self._interval.due()):
            return
        figures = self._figures()
        if figures != self._before:
            self._before = figures
            self._lines.write({"time": time.time(), **figures, "memory": process_memory()[0]})

    def close(self) -> None:
        self.write_if_due(last=True)
        if self._lines is not None:
            self._lines.close()

    def _figures(self) -> dict[str, Any]:
        known = self._shard.figures()
        received, sent = self._traffic()
        return {**known, "bytes_in": received, "bytes_out": sent}
