"""Recorder: notes what this process does while a few steps are recorded.

``activity.recorder`` is it, and ``None`` at all other times: what can be recorded asks for that and nothing more. Spans
are kept in memory on this process's own clock; see ``recording`` for what becomes of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any

from echelon.distributed.activity import AFTER, activity, waiting
from echelon.observability.trace.span import HOST, NETWORK, Span

if TYPE_CHECKING:
    from echelon.distributed.activity import ServerMessage
    from echelon.plan.schedule import Action

Arguments = tuple[Sequence[Any], Mapping[str, Any]]

#: Waits of a pipeline's rank for another stage: its bubbles.
OF_STAGES = ("receive activations", "receive gradients", "delivery of what was sent")
#: Waits of a rank for its own GPU or disk.
OF_ITS_OWN = ("from the GPU", "end of the save before")
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


def now() -> float:
    """The clock of all spans, which is the one by which ``activity`` measures waits."""
    return monotonic()


class TraceRecorder:
    """step: the one that is under way; phase: the part of it, and since when; arguments: of a call of the model."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.arguments: Arguments | None = None
        self.spans: list[Span] = []
        self.phase = AFTER["update"], now()
        self.thread = threading.get_ident()

    def lap(self, phase: str, at: float) -> None:
        """A phase of the step is over; the update is its last."""
        self.spans.append(Span(phase, phase, HOST, self.phase[1], at, self.step, more={"phase": True}))
        self.phase = AFTER[phase], at
        self.step += phase == "update"

    def waited(self, wait: waiting, at: float) -> None:
        """The training thread has waited for other ranks."""
        self.spans.append(wait_span(wait, at, self.step))

    def called(self, call: str, since: float, at: float) -> None:
        """A call of the engine besides the step is over: a save, an evaluation."""
        if call not in ("step", "update"):
            self.spans.append(Span(call, "other", HOST, since, at, self.step))

    def loaded(self, since: float) -> None:
        """The loader has handed out a batch that was asked for then."""
        self.spans.append(Span("wait for a batch", "data", HOST, since, now(), self.step))

    def acted(self, action: Action, since: float) -> None:
        """A pipeline's rank has done an action, waiting for what it needs included."""
        kind, micro, stage = action
        if activity.call == "step":
            more = {"action": kind, "micro": micro, "stage": stage}
            self.spans.append(Span(f"{kind}{micro}", _ACTIONS[kind], HOST, since, now(), self.step, more=more))

    def served(self, kind: str, since: float) -> None:
        """The training thread has waited for parameter servers."""
        self.spans.append(Span(f"wait for a {kind}", kind, HOST, since, now(), self.step))

    def asked(self, kind: str, since: float, sent: Sequence[ServerMessage], answers: Sequence[Future[Any]]) -> None:
        """Requests to parameter servers are under way since then; the span ends with the last answer."""
        size = sum(array.nbytes for frame in sent for array in frame.arrays)
        request = _Request(self, kind, since, size, len(answers))
        for answer in answers:
            answer.add_done_callback(request.answered)


def wait_span(wait: waiting, at: float, step: int) -> Span:
    """A wait of the training thread, until now."""
    kind = "bubble" if wait.call in OF_STAGES else "other" if wait.call.endswith(OF_ITS_OWN) else "wait"
    more = {"what": str(wait.what)} if wait.what != "" else {}
    return Span(wait.call, kind, HOST, wait.since, at, step, ranks=str(wait.ranks), more=more)


class _Request:
    """What was asked of all servers at once. Answers are noted by the threads of the links."""

    def __init__(self, recorder: TraceRecorder, kind: str, begun: float, size: int, missing: int) -> None:
        self._recorder, self._kind, self._begun = recorder, kind, begun
        self._size, self._missing, self._step = size, missing, recorder.step
        self._lock = threading.Lock()

    def answered(self, answer: Future[Any]) -> None:
        at = now()
        with self._lock:
            if not answer.cancelled() and answer.exception() is None:
                self._size += sum(array.nbytes for array in answer.result().arrays)
            self._missing -= 1
            if self._missing:
                return
        span = Span(self._kind, self._kind, NETWORK, self._begun, at, self._step, bytes=self._size)
        self._recorder.spans.append(span)
