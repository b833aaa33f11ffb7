"""``LiveSpanWriter``: writes a rank's spans to disk during a trace, so that they survive a crash of the process.

Spans are written at the end of each step, in one system call. During a long step, a thread regularly writes new spans
and the current activity of the rank, which shows a stall or the moments before a crash.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from echelon.distributed.activity import activity
from echelon.observability.trace import trace_files
from echelon.observability.trace.comm_hooks import CommHooks, CommRecord
from echelon.observability.trace.partial_file import now_line, spans_line
from echelon.observability.trace.span import HOST, KINDS, NETWORK, Span
from echelon.observability.trace.span_recorder import TraceRecorder, now, wait_span

#: Seconds between two writes during a step.
TICK = 0.2


class LiveSpanWriter:
    """Writes a rank's partial file; call ``step()`` after each step, then ``end()`` if the trace was cut short, or
    ``remove()`` if it is complete.

    failed: reason why writing has stopped, such as a full disk; the trace itself continues in memory
    """

    def __init__(
        self, folder: Path, rank: int, about: dict[str, Any], recorder: TraceRecorder, taps: CommHooks
    ) -> None:
        self._recorder, self._taps = recorder, taps
        self._noted, self._sent = 0, 0  # numbers of spans and messages handled so far
        self._under_way: list[CommRecord] = []
        self._lock, self._over, self._quiet = threading.Lock(), threading.Event(), True
        self.failed: str | None = None
        self._path = folder / trace_files.part_name(rank)
        self._file: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        except OSError as error:
            self.failed = f"'{self._path}' cannot be written: {error.strerror}"
        self._write(trace_files.first_line(about))
        threading.Thread(target=self._watch, name="echelon-timeline", daemon=True).start()

    def step(self) -> None:
        """Write the spans of a finished step."""
        with self._lock:
            self._quiet = False
            self._write(spans_line(self._new()))

    def end(self, said: str, lost: bool, more: list[Span]) -> None:
        """Write the end of a trace that was cut short.

        said: the error that ended the run; "" without one
        lost: True if another rank was lost
        more: further spans, known only now
        """
        with self._lock:
            self._write(spans_line([*self._new(), *more]) + self._now(said, lost))
        self.close()

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop writing and keep the file."""
        self._over.set()
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            with self._lock:
                if self._quiet:
                    self._write(spans_line(self._new()) + self._now())
                self._quiet = True

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            self.failed = f"'{self._path}' cannot be written: {error.strerror}"
            os.close(self._file)
            self._file = None

    def _new(self) -> list[Span]:
        """Return the spans since the last call. Other threads may add spans at the same time."""
        spans = self._recorder.spans[self._noted :]
        messages = self._taps.messages[self._sent :]
        self._noted, self._sent = self._noted + len(spans), self._sent + len(messages)
        known = [message for message in (*self._under_way, *messages) if message.on_host]
        self._under_way = []
        for message in known:
            if (span := message.span()) is not None:
                spans.append(span)
            else:
                self._under_way.append(message)
        return spans

    def _now(self, said: str | None = None, lost: bool = False) -> str:
        at, recorder, wait = now(), self._recorder, activity.wait
        phase, since = recorder.phase
        under_way = [Span(phase, phase if phase in KINDS else "other", HOST, since, max(at, since), recorder.step)]
        if wait is not None:
            under_way.append(wait_span(wait, max(at, wait.since), recorder.step))
        under_way += [
            Span(m.name, "communicate", NETWORK, m.begin, max(at, m.begin), m.step, m.bytes, m.ranks)
            for m in self._under_way
        ]
        return now_line(at, under_way, said, lost)
