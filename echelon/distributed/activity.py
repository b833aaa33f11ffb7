"""The current activity of this process: its phase, call and wait. The training thread writes it, the reporter reads it.

All of this runs in every step: plain assignments, well under a microsecond each.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future


class ServerMessage(Protocol):
    """A message to a parameter server; a trace counts its bytes."""

    @property
    def arrays(self) -> Sequence[Any]: ...


class SpanRecorder(Protocol):
    """Records spans for a trace (``observability/trace/span_recorder.py``).

    arguments:  arguments of the first call of the model, for counting its FLOPs
    """

    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None

    def note_arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> None: ...
    def loaded(self, since: float) -> None: ...
    def lap(self, phase: str, since: float) -> None: ...
    def served(self, kind: str, since: float) -> None: ...
    def waited(self, wait: waiting, at: float) -> None: ...
    def called(self, call: str, since: float, phase_since: float) -> None: ...
    def acted(self, action: Any, since: float) -> None: ...
    def summed(self, call: str, since: float, waited: float, size: int, whom: Whom, key: str) -> None: ...
    def record_request(
        self, kind: str, since: float, sent: Sequence[ServerMessage], answers: Sequence[Future[Any]]
    ) -> None: ...


#: The phase that follows each phase of a step; see ``observability/metrics/step_clock.PHASES``.
AFTER = {
    "data": "forward",
    "forward": "backward",
    "backward": "communicate",
    "communicate": "update",
    "update": "user code",
}
#: The ranks of a wait for all ranks.
EVERYONE = "all"
Whom = dist.ProcessGroup | Sequence[int] | str | None


class Activity:
    """The activity of one process; each process has one.

    call:      engine call in progress, '' in user code
    calls:     number of engine calls so far
    wait:      current wait of the training thread
    counts:    number of waits of each kind, by the ranks that take part
    waited:    seconds spent in waits, including waits for parameter servers
    busy:      seconds of this rank's own work by phase, without waits for others
    alike:     ranks whose part of a step equals this rank's
    recorder:  recorder of a trace, while steps are recorded
    """

    def __init__(self) -> None:
        self.phase, self.phase_since = "user code", monotonic()
        self.step, self.steps = 0, 0
        self.call, self.calls = "", 0
        self.wait: waiting | None = None
        self.counts: dict[tuple[str, str], int] = {}
        self.waited = 0.0
        self.busy: dict[str, float] = defaultdict(float)
        self.alike: Sequence[int] = ()
        self.recorder: SpanRecorder | None = None
        self._lapped, self._waited_then = monotonic(), 0.0

    def share_part(self, ranks: Sequence[int]) -> None:
        """Set the ranks whose part of a step equals this rank's."""
        self.alike = ranks

    def record_with(self, recorder: SpanRecorder | None) -> None:
        """Record steps with this recorder from now on; None ends recording."""
        self.recorder = recorder

    def now(self) -> float:
        """Return the time on the clock of all waits."""
        return monotonic()

    def end_step(self) -> None:
        """Count a finished step."""
        self.steps += 1

    def enter(self, phase: str) -> None:
        if self.recorder is not None and self.phase == "data":
            self.recorder.loaded(self.phase_since)
        self.phase, self.phase_since = phase, monotonic()

    def lap(self, phase: str) -> float:
        """End a phase of a step: its time minus waits counts as work. Returns the current time."""
        now = monotonic()
        self.busy[phase] += now - self._lapped - (self.waited - self._waited_then)
        self._lapped, self._waited_then = now, self.waited
        self.phase, self.phase_since = AFTER[phase], now
        if self.recorder is not None:
            self.recorder.lap(phase, now)
        return now

    def served(self, kind: str, since: float) -> None:
        """Count the time since ``since`` as a wait for parameter servers; ``kind`` is pull or push."""
        self.waited += monotonic() - since
        if self.recorder is not None:
            self.recorder.served(kind, since)

    def passed(self, phase: str) -> None:
        """End a phase on a GPU, where the host's time says nothing about the work."""
        self.phase, self.phase_since = AFTER[phase], monotonic()
        if self.recorder is not None:
            self.recorder.lap(phase, self.phase_since)


activity = Activity()


class waiting:
    """Marks a block that may wait for other ranks: ``with waiting("sum of gradients", "bucket 3", group):``.

    what:  details, converted with ``str`` when a report shows them
    whom:  ranks that must arrive, or one rank as text; ``None``: all ranks of the job

    A wait inside another wait is part of the outer one.
    """

    __slots__ = ("_inner", "call", "number", "ranks", "since", "what")

    def __init__(self, call: str, what: object = "", whom: Whom = None) -> None:
        self.call = call
        self.what = what
        self.ranks = whom
        self.number = 0

    def __enter__(self) -> None:
        self._inner = activity.wait is not None
        if not self._inner:
            self.ranks = describe_ranks(self.ranks)
            key = self.call, self.ranks
            self.number = activity.counts[key] = activity.counts.get(key, 0) + 1
            self.since = monotonic()
            activity.wait = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._inner:
            activity.wait = None
            now = monotonic()
            activity.waited += now - self.since
            if activity.recorder is not None:
                activity.recorder.waited(self, now)


class calling:
    """Marks an engine call that all ranks make together."""

    __slots__ = ("_before", "_call", "_phase", "_since", "_step")

    def __init__(self, call: str, step: int, phase: str) -> None:
        self._call, self._step, self._phase = call, step, phase

    def __enter__(self) -> None:
        self._before = activity.call, activity.phase
        activity.calls += not activity.call
        activity.call, activity.step = self._call, self._step
        self._since = monotonic()
        activity.phase, activity.phase_since = self._phase, self._since

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.call, phase = self._before
        activity.phase, activity.phase_since = phase if activity.call else "user code", monotonic()
        if activity.recorder is not None:
            activity.recorder.called(self._call, self._since, activity.phase_since)


def span(names: Sequence[str]) -> str:
    """Return ``first .. last``."""
    return f"{names[0]} .. {names[-1]}" if len(names) > 1 else "".join(names)


_circles: dict[int, str] = {}
_kept: dict[int, weakref.ref[dist.ProcessGroup]] = {}


def describe_ranks(whom: Whom) -> str:
    """Return ranks in short form: ``all``, ``0-7``, ``0-14:2`` or ``0,3,4``. A group's ranks are cached for speed."""
    if whom is None:
        return EVERYONE
    known = _circles.get(id(whom))  # an entry is removed with its group, so no other object can have that id
    if known is not None:
        return known
    if isinstance(whom, str):
        return whom
    return _remember(whom) if isinstance(whom, dist.ProcessGroup) else format_ranks(whom)


def _remember(group: dist.ProcessGroup) -> str:
    key = id(group)

    def forget(_: object) -> None:
        _circles.pop(key, None)
        _kept.pop(key, None)

    _kept[key] = weakref.ref(group, forget)  # a weak reference: a strong one would keep the group's connections open
    _circles[key] = format_ranks(dist.get_process_group_ranks(group))
    return _circles[key]


def format_ranks(ranks: Sequence[int]) -> str:
    ordered = sorted(ranks)
    step = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1, step)):
        return f"{ordered[0]}-{ordered[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ordered))


def parse_ranks(short: str, world_size: int) -> tuple[int, ...]:
    """Parse the result of ``format_ranks``. Raises ``ValueError`` for other text, which may come from the network."""
    if short == EVERYONE:
        return tuple(range(world_size))
    if "-" not in short:
        return tuple(int(rank) for rank in short.split(",") if rank)
    ends, _, step = short.partition(":")
    first, last = (int(end) for end in ends.split("-"))
    return tuple(range(first, min(last, world_size) + 1, int(step or 1)))
