"""``TraceRecorder``: records the activity of this process while a few steps are traced.

``activity.recorder`` is the recorder during a trace, and ``None`` at all other times, so that instrumented code only
checks this attribute. Spans are kept in memory on this process's own clock; ``trace_session`` collects them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any

from echelon.distributed.activity import AFTER, Whom, activity, describe_ranks, waiting
from echelon.observability.trace.span import HOST, NETWORK, Span

if TYPE_CHECKING:
    from echelon.distributed.activity import ServerMessage
    from echelon.plan.schedule import Action

Arguments = tuple[Sequence[Any], Mapping[str, Any]]

#: Waits of a pipeline's rank for another stage, which are bubbles.
OF_STAGES = ("receive activations", "receive gradients", "completion of sends")
#: Waits of a rank for its own GPU or disk.
OF_ITS_OWN = ("from the GPU", "end of the previous save")
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


def now() -> float:
    """Return the time on the clock of all spans, which ``activity`` uses for waits, too."""
    return monotonic()


class TraceRecorder:
    """Records the spans of one process.

    step:      current step
    phase:     current phase and its start
    arguments: arguments of a call of the model; None before one
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.arguments: Arguments | None = None
        self.spans: list[Span] = []
        self.phase = AFTER["update"], now()
        self.thread = threading.get_ident()

    def note_arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Keep the arguments of a call of the model, unless those of an earlier one are there."""
        self.arguments = self.arguments or (args, named)

    def lap(self, phase: str, at: float) -> None:
        """Record a finished phase of the step; the update is the last phase."""
        self.spans.append(Span(phase, phase, HOST, self.phase[1], at, self.step, more={"phase": True}))
        self.phase = AFTER[phase], at
        self.step += phase == "update"

    def waited(self, wait: waiting, at: float) -> None:
        """Record a wait of the training thread for other ranks."""
        self.spans.append(wait_span(wait, at, self.step))

    def called(self, call: str, since: float, at: float) -> None:
        """Record an engine call other than a step, such as a save or an evaluation."""
        if call not in ("step", "update"):
            self.spans.append(Span(call, "other", HOST, since, at, self.step))

    def loaded(self, since: float) -> None:
        """Record the wait for a batch, which was requested at ``since``."""
        self.spans.append(Span("wait for a batch", "data", HOST, since, now(), self.step))

    def acted(self, action: Action, since: float) -> None:
        """Record an action of a pipeline, including the wait for its inputs."""
        kind, micro, stage = action
        if activity.call == "step":
            more = {"action": kind, "micro": micro, "stage": stage}
            self.spans.append(Span(f"{kind}{micro}", _ACTIONS[kind], HOST, since, now(), self.step, more=more))

    def summed(self, call: str, since: float, waited: float, size: int, whom: Whom, key: str) -> None:
        """Record a sum in memory that ranks share, which is no message.

        waited: time from which on this rank has waited for the others and added up
        key:    identifier of the sum, which is the same on all its ranks
        """
        more = {"key": key, "told": True, "waited": waited}
        span = Span(call, "communicate", NETWORK, since, now(), self.step, size, describe_ranks(whom), more)
        self.spans.append(span)

    def served(self, kind: str, since: float) -> None:
        """Record a wait of the training thread for parameter servers."""
        self.spans.append(Span(f"wait for a {kind}", kind, HOST, since, now(), self.step))

    def record_request(
        self, kind: str, since: float, sent: Sequence[ServerMessage], answers: Sequence[Future[Any]]
    ) -> None:
        """Record requests to parameter servers, sent at ``since``; the span ends with the last answer."""
        size = sum(array.nbytes for frame in sent for array in frame.arrays)
        request = _Request(self, kind, since, size, len(answers))
        for answer in answers:
            answer.add_done_callback(request.answered)


def wait_span(wait: waiting, at: float, step: int) -> Span:
    """Return the span of a wait of the training thread that ends at ``at``."""
    kind = "bubble" if wait.call in OF_STAGES else "other" if wait.call.endswith(OF_ITS_OWN) else "wait"
    more = {"what": str(wait.what)} if wait.what != "" else {}
    return Span(wait.call, kind, HOST, wait.since, at, step, ranks=str(wait.ranks), more=more)


class _Request:
    """A request to all servers at once. The threads of the channels record the answers."""

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
