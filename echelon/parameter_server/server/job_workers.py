"""The workers of a job, the steps that each takes part in, and their last heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class WorkerMembership:
    """A worker's membership in the job.

    spans:       [first step, last step or None] of each period in which the worker took part
    seq:         sequence number of the last push received from the worker
    committed:   sequence number of the last push that counts
    fenced:      True while the worker is being dropped: its requests are refused
    passes:      passes over the data that the worker has finished
    pass_after:  sequence number of the push after which the worker finished its last pass
    """

    spans: list[list[int | None]] = field(default_factory=list)
    seq: int = -1
    committed: int = -1
    fenced: bool = False
    passes: int = 0
    pass_after: int = -1

    def live(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] is None

    def takes_part(self, step: int) -> bool:
        return any(first is not None and first <= step and (last is None or step <= last) for first, last in self.spans)


class JobWorkers:
    """The workers of a job. Only journaled requests change them, so that a replay gives the same result."""

    def __init__(self, trainers: int) -> None:
        self.seats = {worker: WorkerMembership([[0, None]]) for worker in range(trainers)}

    def at(self, step: int) -> list[int]:
        """Return the workers that take part in a step, in ascending order."""
        return sorted(worker for worker, seat in self.seats.items() if seat.takes_part(step))

    def live(self) -> list[int]:
        return sorted(worker for worker, seat in list(self.seats.items()) if seat.live())

    def is_live(self, worker: int) -> bool:
        return worker in self.seats and self.seats[worker].live()

    def last_step(self, worker: int) -> int:
        """Return the last step of a worker that is not a member any more; -1 if there is none."""
        seat = self.seats.get(worker)
        last = seat.spans[-1][1] if seat and seat.spans else None
        return -1 if last is None else last

    def enter(self, worker: int, step: int, passes: int) -> None:
        """Make a worker a member from ``step`` on; its pushes are numbered from there."""
        seat = self.seats.setdefault(worker, WorkerMembership())
        if seat.live():
            seat.spans.pop()  # an earlier entry that the other servers did not complete
        seat.spans = [*seat.spans[-3:], [step, None]]
        seat.seq = seat.committed = seat.pass_after = step - 1
        seat.fenced, seat.passes = False, passes

    def end(self, worker: int, last: int) -> None:
        """End a worker's membership after step ``last``."""
        seat = self.seats.get(worker)
        if seat is None or not seat.live():
            return
        first = seat.spans[-1][0]
        if first is not None and first > last:
            seat.spans.pop()
        else:
            seat.spans[-1][1] = last
        seat.seq, seat.committed = min(seat.seq, last), min(seat.seq, last)

    def facts(self) -> dict[str, Any]:
        return {str(worker): asdict(seat) for worker, seat in self.seats.items()}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> JobWorkers:
        made = cls(0)
        made.seats = {int(worker): WorkerMembership(**seat) for worker, seat in facts.items()}
        return made


class WorkerHeartbeats:
    """The time of each worker's last heartbeat.

    The times are not persistent: a restarted server gives every worker the full time again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self._began = clock, clock()
        self._heard: dict[int, float] = {}

    def hear(self, worker: int) -> None:
        if worker >= 0:
            self._heard[worker] = self.clock()

    def ever(self, worker: int) -> bool:
        return worker in self._heard

    def silent_for(self, worker: int) -> float:
        return self.clock() - self._heard.get(worker, self._began)
