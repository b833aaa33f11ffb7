"""``RunLogWriter``: writes an engine's run.json and its events."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base.environment import LOG_DIR, RESTART_COUNT, RESTARTS, whole_number
from echelon.base.errors import first_line
from echelon.distributed.collectives import gather_json
from echelon.observability.runlog.events import Kind, note_event
from echelon.observability.runlog.log_files import RUN, set_run_directory, write_whole
from echelon.observability.runlog.tolerant_json import JSON, json_file, number, objects

if TYPE_CHECKING:
    from echelon.observability.engine_view import EngineView

#: Time at which this process first wrote into a directory; all its engines there belong to one attempt.
_started: dict[Path, float] = {}


class RunLogWriter:
    """Writes run.json (rank 0 only) and events; writes nothing if ``directory`` is None.

    is_tracked: True if trackers ask for the settings, also without a directory
    """

    def __init__(self, directory: Path | None, rank: int, is_tracked: bool = False) -> None:
        self._directory, self._rank = directory, rank
        self._is_tracked = is_tracked
        if directory is not None:
            set_run_directory(directory)
            _started.setdefault(directory, time.time())
        self._said: Sequence[str] = ()  # startup lines
        self._start: JSON = {}
        self._settings: list[JSON] = []
        self._ranks: list[JSON] | None = None  # None until ``begun``
        self._facts: JSON = {}
        self._earlier: JSON | None = None
        self.peak_seconds: float | None = None  #: time of a step at the nominal peak of all devices; None if unknown
        self._goes_on = whole_number(os.environ, RESTART_COUNT, 0) + whole_number(os.environ, RESTARTS, 0) > 0

    @property
    def directory(self) -> Path | None:
        return self._directory

    def event(self, kind: Kind, text: str) -> None:
        """Write an event of this rank; an event of the whole job must be written by one rank only."""
        note_event(self._directory, kind, text, self._rank)

    def settings(self, values: Mapping[str, tuple[Any, str]]) -> None:
        """Add settings of the run as ``name: (value, origin)``; later values replace earlier ones."""
        self._settings = [one for one in self._settings if one["name"] not in values]
        self._settings += [{"name": name, "value": value, "origin": by} for name, (value, by) in values.items()]
        self._write()

    def announced(self, lines: Iterable[str]) -> Sequence[str]:
        """Keep the startup lines for run.json, and return them."""
        self._said = list(lines)
        return self._said

    def begun(self, engine: EngineView) -> None:
        """Write run.json when a plan becomes active. All ranks call it; it gathers each rank's host and device."""
        from echelon.observability.runlog.run_description import facts_of, known_flops, own_facts, promised_flops

        own, control = own_facts(engine), engine.world.control
        self._ranks = [own] if control is None else gather_json(own, control, "hardware of each rank")
        flops, peak = known_flops(engine), promised_flops(self._ranks)
        self.peak_seconds = flops / peak if flops and peak else None
        if self._collects:
            self._earlier = None if self._directory is None else json_file(self._directory / RUN)
            self._facts = facts_of(engine, self._ranks)
            self._write()

    def assembled(self, engine: EngineView) -> None:
        """Write run.json again after the model is parallelized: a pipeline's stages are known only then."""
        if self._ranks is not None and self._collects:
            from echelon.observability.runlog.run_description import facts_of

            self._facts = facts_of(engine, self._ranks)
            self._write()

    def started(self, seconds: Mapping[str, float]) -> None:
        """Record the seconds from the start of rank 0's process to the end of its first step, by part."""
        self._start = dict(seconds)
        if self._rank == 0:
            self._write()

    def resumed(self) -> None:
        """Record that training resumed from an earlier process, whose files then belong to this run."""
        if not self._goes_on:
            self._goes_on = True
            self._write()

    def measured(self, engine: EngineView) -> None:
        """Write the memory of this rank at the end of the run."""
        if self._directory is not None and engine.steps:
            from echelon.observability.runlog.measured_memory import write_measured_memory

            write_measured_memory(engine, self._directory)

    def closed(self, steps: int, error: BaseException | None = None) -> None:
        """Write the final event; failures under ``echelon run`` are left to the launcher."""
        if self._rank == 0 and error is None:
            self.event("ended", f"training ended after step {steps}")
        elif error is not None and LOG_DIR not in os.environ:
            from echelon.base.user_traceback import format_error

            text = f"rank {self._rank} failed with {first_line(error, typed=True)}"
            trace = format_error(error, error.__traceback__)
            note_event(self._directory, "failed", text, self._rank, step=steps, traceback=trace)

    @property
    def goes_on(self) -> bool:
        """True if this process continues a run, after a restart or from a checkpoint."""
        return self._goes_on

    def tracked(self) -> JSON:
        """Return what trackers show as the settings of the run: run.json without what concerns single ranks."""
        from echelon.observability.runlog.run_description import is_secret

        facts = {name: value for name, value in self._facts.items() if name not in ("ranks", "stages", "predicted")}
        settings = {one["name"]: one["value"] for one in self._settings if not is_secret(one["name"])}
        return {**facts, "settings": settings}

    @property
    def _collects(self) -> bool:
        return self._rank == 0 and (self._directory is not None or self._is_tracked)

    def _write(self) -> None:
        if not self._facts or self._directory is None:
            return
        started, began, attempt = self._attempt()
        times = {"started": started, "began": began, "attempt": attempt}
        details = {"settings": self._settings, "said": list(self._said), "start": self._start}
        write_whole(self._directory / RUN, {"format": 1, **self._facts, **times, **details})

    def _attempt(self) -> tuple[float, float, int]:
        """Return the start times of this attempt and of the first one, and the number of earlier attempts."""
        assert self._directory is not None
        earlier, started = self._earlier or {}, _started[self._directory]
        if number(earlier, "started") is None or not self._goes_on:
            return started, started, whole_number(os.environ, RESTART_COUNT, 0)
        began = number(earlier, "began") or started
        attempt = int(number(earlier, "attempt") or 0)
        ours = any(one.get("pid") == os.getpid() for one in objects(earlier, "ranks")[:1])
        return started, began, attempt if ours else attempt + 1
