"""The workers of a job, the steps that each takes part in, and their last heartbeats."""

from __future__ import annotations

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
        self.memberships = {worker: WorkerMembership([[0, None]]) for worker in range(trainers)}

    def at(self, step: int) -> list[int]:
        """Return the workers that take part in a step, in ascending order."""
        return sorted(worker for worker, membership in self.memberships.items() if membership.takes_part(step))

    def live(self) -> list[int]:
        return sorted(worker for worker, membership in list(self.memberships.items()) if membership.live())

    def is_live(self, worker: int) -> bool:
        return worker in self.memberships and self.memberships[worker].live()

    def last_step(self, worker: int) -> int:
        """Return the last step of a worker that is not a member any more; -1 if there is none."""
        membership = self.memberships.get(worker)
        last = membership.spans[-1][1] if membership and membership.spans else None
        return -1 if last is None else last

    def enter(self, worker: int, step: int, passes: int) -> None:
        """Make a worker a member from ``step`` on; its pushes are numbered from there."""
        membership = self.memberships.setdefault(worker, WorkerMembership())
        if membership.live():
            membership.spans.pop()  # an earlier entry that the other servers did not complete
        membership.spans = [*membership.spans[-3:], [step, None]]
        membership.seq = membership.committed = membership.pass_after = step - 1
        membership.fenced, membership.passes = False, passes

    def resume_passes(self, passes: int) -> None:
        """Let all workers go on from ``passes`` finished passes: workers that began at 0 would end none for so many."""
        for membership in self.memberships.values():
            # No push has this number, so that a pass that ends before the next push counts.
            membership.passes, membership.pass_after = passes, -2

    def end(self, worker: int, last: int) -> None:
        """End a worker's membership after step ``last``."""
        membership = self.memberships.get(worker)
        if membership is None or not membership.live():
            return
        first = membership.spans[-1][0]
        if first is not None and first > last:
            membership.spans.pop()
        else:
            membership.spans[-1][1] = last
        membership.seq, membership.committed = min(membership.seq, last), min(membership.seq, last)

    def facts(self) -> dict[str, Any]:
        return {str(worker): asdict(membership) for worker, membership in self.memberships.items()}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> JobWorkers:
        made = cls(0)
        made.memberships = {int(worker): WorkerMembership(**membership) for worker, membership in facts.items()}
        return made
