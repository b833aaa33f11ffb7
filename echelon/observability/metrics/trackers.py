"""Trackers: libraries and functions that receive each record; each has a thread, so that no step waits for it."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from echelon.base.errors import one_line
from echelon.observability.runlog.log_files import CORPORA, LOGGED
from echelon.observability.runlog.step_phases import BETWEEN, PHASES

Record = dict[str, Any]
#: Records that may wait for a tracker; later ones are dropped.
WAITING = 1000
#: Seconds that the end of the run waits for a tracker.
PATIENCE = 60.0


class Tracker(Protocol):
    """A library that records runs; all its methods are called in one thread of its own."""

    name: str

    def open(self) -> None:
        """Begin a run, or continue the one of an earlier attempt, and pass the settings on."""

    def write(self, record: Record) -> None: ...

    def close(self, failed: bool) -> None: ...


class FunctionTracker:
    """A user's function, which is called with each record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self.name = f"log function {getattr(function, '__name__', type(function).__name__)}"
        self._function = function

    def open(self) -> None:
        """Do nothing: a function needs no preparation."""

    def write(self, record: Record) -> None:
        self._function(copy.deepcopy(record))

    def close(self, failed: bool) -> None:
        """Do nothing: a function is not told of the end."""


class BackgroundSink:
    """Passes records to a tracker in a thread. What fails there costs a line and not the run.

    warn:   callback for one line; it is called in the thread, too
    opened: callback in the thread after the tracker is opened: its library may have registered an exit handler, and
            that of the run must be called before it
    """

    def __init__(self, tracker: Tracker, warn: Callable[[str], None], opened: Callable[[], None]) -> None:
        self._tracker, self._warn, self._opened = tracker, warn, opened
        self._queue: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._dropped = self._failed = 0
        self._has_ended_badly = False  # True if the run has failed
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"echelon-{tracker.name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(
                    f"{self._tracker.name}: {WAITING} records wait for it; later ones are dropped until it goes on"
                )

    def close(self, failed: bool = False) -> None:
        self._has_ended_badly = failed
        try:
            self._queue.put(None, timeout=PATIENCE)
        except queue.Full:
            self._given_up.set()
        else:
            self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._given_up.set()
            lost = f"{self._queue.qsize()} records" if self._queue.qsize() > 1 else "its last record or its end"
            self._warn(f"{self._tracker.name}: not done {PATIENCE:g} s after the end; {lost} may be missing")
        if self._dropped or self._failed > 1:
            self._warn(f"{self._tracker.name}: {self._dropped + self._failed} records are missing there")

    def _work(self) -> None:
        is_open = self._tried("cannot be opened, so that it gets no records", self._tracker.open)
        self._opened()
        while (record := self._queue.get()) is not None:
            if not is_open or self._given_up.is_set():
                continue
            written = record
            complaint = None if self._failed else f"a record of step {record.get('step')} is missing there"
            if not self._tried(complaint, lambda written=written: self._tracker.write(written)):  # type: ignore[misc]
                self._failed += 1
        if is_open:
            self._tried("its run is not closed", lambda: self._tracker.close(self._has_ended_badly))

    def _tried(self, complaint: str | None, act: Callable[[], None]) -> bool:
        """Call ``act``; on an error, print ``complaint`` with the reason and return False."""
        try:
            act()
        except BaseException as error:  # a library may raise anything, SystemExit included, and training goes on
            if complaint is not None:
                self._warn(f"{self._tracker.name}: {complaint}; training goes on: {one_line(error, typed=True)}")
            return False
        return True


def named_numbers(record: Mapping[str, Any], logged: str = "") -> dict[str, float]:
    """Return the numbers of a record under the names that trackers show.

    logged: prefix of the script's own names, default none
    """
    found = {}
    for name, value in record.items():
        if name not in ("step", "total", "time") and isinstance(value, int | float):
            found[f"{'milliseconds' if name in PHASES or name in BETWEEN else 'train'}/{name}"] = float(value)
    found |= {f"{CORPORA}/{name}": float(count) for name, count in record.get(CORPORA, {}).items()}
    return found | {f"{logged}{name}": float(value) for name, value in record.get(LOGGED, {}).items()}
