"""``WaitNotice``: the line by which a process says, at the start of a job, which other process it waits for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.base.console import say
from echelon.base.environment import WAIT_LINES, WAIT_NOTICE

#: Seconds of waiting before the line is printed, unless the environment sets another value.
AFTER = 5.0

Say = Callable[[str, str], None]


class WaitNotice:
    """One wait of this process for others.

    who:     the process that waits, for example "rank 0"
    limit:   seconds after which it gives up; None: never
    remedy:  advice for the user; '' for none
    say:     function that takes the line and the awaited processes; prints to stderr by default

    The awaited processes are named once; after twice the time they are named again, but only if they have changed.
    """

    def __init__(
        self,
        who: str,
        limit: float | None,
        remedy: str = "",
        *,
        component: str = "join",
        say: Say | None = None,
    ) -> None:
        self._who = who
        self._limit = limit
        self._remedy = remedy
        self._component = component
        self._say = say or print_wait
        self._began, self._due, self._announced = time.monotonic(), _after(), ""

    def poll(self, awaited: str) -> None:
        """Print the line if it is due; ``awaited`` is '' if there is nothing to wait for."""
        waited = time.monotonic() - self._began
        if not awaited or awaited == self._announced or waited < self._due:
            return
        self._announced, self._due = awaited, 2 * waited
        self._say(self._line(awaited, waited), awaited)

    @contextmanager
    def during(self, awaited: Callable[[], str]) -> Iterator[None]:
        """Print the line from a thread while the caller is blocked; ``awaited`` is called when the line is due."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(max(0.05, min(1.0, self._began + self._due - time.monotonic()))):
                if time.monotonic() - self._began >= self._due:
                    self.poll(awaited())

        threading.Thread(target=watch, name="wait notice", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _line(self, awaited: str, waited: float) -> str:
        then = "" if self._limit is None else f"; it gives up after {self._limit:g} s"
        remedy = f"; {self._remedy}" if self._remedy else ""
        return f"{self._component}: {self._who} has waited {waited:.0f} s for {awaited}{then}{remedy}"


def say_wait(line: str, awaited: str) -> None:
    """Print a line about a wait of the launcher itself, whose stderr is the console."""
    say(line)


def print_wait(line: str, awaited: str) -> None:
    """Print a line about a wait to stderr, or leave it to the launcher of this host.

    The launcher names each awaited process once, even if several of its processes wait for it. Only rank 0 has the
    launcher's console as its stderr: its line goes to the log alone, as on every other rank.
    """
    text = f"echelon: {line}\n"
    directory = os.environ.get(WAIT_LINES, "")
    log = getattr(getattr(sys.stderr, "buffer", None), "log", None) if os.path.isdir(directory) else None
    if log is not None:
        log.write(text.encode())
    else:
        sys.stderr.write(text)
        sys.stderr.flush()
    if os.path.isdir(directory):
        path = Path(directory, f"{os.getpid()}-{time.monotonic_ns()}.json")
        path.with_suffix(".part").write_text(json.dumps({"line": line, "awaited": awaited}))
        path.with_suffix(".part").replace(path)


def _after() -> float:
    try:
        return float(os.environ[WAIT_NOTICE])
    except (KeyError, ValueError):
        return AFTER


def name_ranks(ranks: set[int], kind: str = "rank", most: int = 20) -> str:
    """Return "rank 1", "ranks 1, 2" or, for many, the first of them and the number of the others."""
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:most])
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"{kind}{'s' if len(ranks) > 1 else ''} {shown}{more}"
