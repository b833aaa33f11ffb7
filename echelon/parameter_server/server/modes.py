"""The update modes sync, async, bounded and geo behind one interface: they decide when updates are applied.

A mode is changed under the shard's apply lock, by journaled requests only, and reads no clock: the same requests in the
same order give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from echelon.base.errors import EchelonError
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.request import PushRequest, RequestError
from echelon.parameter_server.server.dense import Floats
from echelon.parameter_server.server.job_workers import JobWorkers
from echelon.parameter_server.server.staleness import Staleness
from echelon.parameter_server.server.store import ServerStore
from echelon.parameter_server.table import merge

#: Steps that a worker may push ahead of the applied step in sync mode; such pushes wait in memory.
MOST_AHEAD = 16


class UpdateMode:
    """Base class of the update modes. ``version`` counts applied steps in sync mode, applied pushes in the others."""

    def __init__(self, job: JobSpec, store: ServerStore, members: JobWorkers, on_step: Callable[[], None]) -> None:
        self.job = job
        self.store = store
        self.members = members
        self.on_step = on_step
        self.version = 0
        self.frozen = False  #: a worker is joining: nothing is applied until all servers know the worker
        self.staleness = Staleness()
        self.loss: float | None = None  #: mean over all workers in the last step; None if no worker had a sample

    # ---- changes ----

    def check(self, push: PushRequest) -> None:
        """Raise an error for a push that has the right sequence number but comes at the wrong time."""

    def take(self, push: PushRequest, frame: WireMessage) -> int:
        """Take a worker's next push and return its staleness. ``frame`` is the message that contained the push."""
        raise NotImplementedError

    def commit(self, worker: int, seq: int) -> None:
        """Record that all servers have the worker's pushes up to ``seq``."""

    def discard(self, worker: int, after: int) -> None:
        """Discard the held pushes of a worker after step ``after``."""

    def settle(self) -> None:
        """Apply the steps that have become complete, after members or commits have changed."""

    # ---- queries ----

    def missing(self, worker: int, step: int) -> dict[int, str]:
        """Return the workers that the step has to wait for, each with a description of what is missing."""
        return {}

    def applied(self, worker: int, seq: int) -> bool:
        """Return True if a push of a worker is part of the weights."""
        return True

    def entry(self) -> int:
        """Return the step at which a new worker enters: the step of the slowest worker."""
        live = [self.members.memberships[worker].seq + 1 for worker in self.members.live()]
        return min(
            live, default=max((membership.seq + 1 for membership in self.members.memberships.values()), default=0)
        )

    # ---- persistence ----

    def pending(self) -> list[WireMessage]:
        """Return the pushes that were received and not applied yet."""
        return []

    def hold(self, push: PushRequest, frame: WireMessage) -> None:
        """Hold a pending push, for example when a snapshot is restored."""


class SyncMode(UpdateMode):
    """Synchronous steps: the weighted mean of the members' gradients is applied when all members have committed."""

    def __init__(self, job: JobSpec, store: ServerStore, members: JobWorkers, on_step: Callable[[], None]) -> None:
        super().__init__(job, store, members, on_step)
        self._held: dict[int, dict[int, tuple[PushRequest, WireMessage]]] = {}

    def check(self, push: PushRequest) -> None:
        if push.seq > self.version + MOST_AHEAD:
            raise RequestError(
                f"worker {push.worker} pushed step {push.seq}, but step {self.version} is not applied yet; "
                "pull the weights of a step before pushing it"
            )

    def take(self, push: PushRequest, frame: WireMessage) -> int:
        self.hold(push, frame)
        if push.commit or self.job.servers == 1:
            self.members.memberships[push.worker].committed = push.seq
        self.settle()
        return max(0, push.seq - push.version)

    def hold(self, push: PushRequest, frame: WireMessage) -> None:
        self._held.setdefault(push.seq, {})[push.worker] = (push, frame)

    def commit(self, worker: int, seq: int) -> None:
        self.members.memberships[worker].committed = max(seq, self.members.memberships[worker].committed)
        self.settle()

    def discard(self, worker: int, after: int) -> None:
        for step, held in self._held.items():
            if step > after:
                held.pop(worker, None)
        lost = next((step for step in range(self.version, after + 1) if self._lacks(worker, step)), None)
        if lost is not None:  # the worker will not send it again, and all would wait for ever
            raise EchelonError(
                f"worker {worker} took part up to step {after}, but this server has lost its state of step {lost}, as "
                "in a power cut without synced journals; start the job again from a checkpoint"
            )

    def _lacks(self, worker: int, step: int) -> bool:
        return worker in self.members.at(step) and worker not in self._held.get(step, {})

    def settle(self) -> None:
        while not self.frozen and not self._waits_for() and self._wanted():
            held = self._held.pop(self.version, {})
            self.apply_step([held[worker][0] for worker in self.members.at(self.version)])

    def apply_step(self, pushes: list[PushRequest]) -> None:
        """Apply the pushes of all workers to the present step, in the order of workers."""
        self._apply(pushes)
        self.version += 1
        self.on_step()

    def _wanted(self) -> bool:
        """Return True if a worker takes part in this step or is still live; a step without members is skipped."""
        return bool(self.members.at(self.version) or self.members.live())

    def missing(self, worker: int, step: int) -> dict[int, str]:
        if self.version >= step:
            return {}
        pushed = self.members.memberships[worker].seq
        if pushed + 1 < step:
            raise RequestError(f"worker {worker} wants the weights for step {step}, but its last push is {pushed}")
        return self._waits_for() or {-1: "a worker is joining" if self.frozen else "no worker is left"}

    def _waits_for(self) -> dict[int, str]:
        held, memberships = self._held.get(self.version, {}), self.members.memberships
        late = {worker: "has not pushed" for worker in self.members.at(self.version) if worker not in held}
        unsure = {
            w: "has not confirmed its push" for w in held if memberships[w].committed < self.version and w not in late
        }
        return late | unsure

    def applied(self, worker: int, seq: int) -> bool:
        return seq < self.version

    def entry(self) -> int:
        return self.version + bool(self.members.at(self.version))

    def pending(self) -> list[WireMessage]:
        return [frame for _, held in sorted(self._held.items()) for _, (_, frame) in sorted(held.items())]

    def _apply(self, pushes: list[PushRequest]) -> None:
        for push in pushes:
            self.staleness.record(max(0, self.version - push.version))
        total = sum(push.weight for push in pushes)
        self.loss = sum(push.loss * push.weight for push in pushes if push.weight) / total if total else None
        if not total:
            return  # no worker had a sample
        shares = [push.weight / total for push in pushes]
        for name in self.store.tables:
            taking = [(push, share) for push, share in zip(pushes, shares, strict=True) if name in push.ids]
            if taking:
                self._apply_table(name, taking)
        dense = [(p.dense, share) for p, share in zip(pushes, shares, strict=True) if p.dense is not None]
        if dense:
            groups = next((push.groups for push in pushes if push.groups), [])
            self.store.update_dense(_weighted(dense), groups)

    def _apply_table(self, name: str, taking: list[tuple[PushRequest, float]]) -> None:
        pushes = [push for push, _ in taking]
        ids, rows = merge([p.ids[name] for p in pushes], [p.rows[name] for p in pushes], [share for _, share in taking])
        dim = self.store.tables[name].dim
        if rows.shape[1] > dim:  # shows and clicks are counts, without weights
            events = merge([p.ids[name] for p in pushes], [p.rows[name][:, dim:] for p in pushes], [1.0] * len(pushes))
            rows[:, dim:] = events[1]
        rate = next((p.rates[name] for p in pushes if name in p.rates), None)
        limit = min((p.limits[name] for p in pushes if name in p.limits), default=None)
        self.store.update(name, ids, rows, rate, limit)


def _weighted(parts: list[tuple[Floats, float]]) -> Floats:
    """Return the weighted sum of the gradients, added in the order of the workers."""
    first, share = parts[0]
    total = first * np.float32(share)
    for gradient, share in parts[1:]:
        total += gradient * np.float32(share)
    return total


class AsyncMode(UpdateMode):
    """Asynchronous updates: each push is applied at once."""

    def check(self, push: PushRequest) -> None:
        for name, ids in push.ids.items():
            self.store.check_room(name, ids)

    def take(self, push: PushRequest, frame: WireMessage) -> int:
        staleness = max(0, self.version - push.version)
        self.members.memberships[push.worker].committed = push.seq
        self._apply(push)
        self.staleness.record(staleness)
        self.version += 1
        self.on_step()
        return staleness

    def _apply(self, push: PushRequest) -> None:
        for name, ids in push.ids.items():
            gradient = push.rows[name]
            if self.job.compensate and name in push.pulled_rows:
                now, pulled = self.store.tables[name].pull(ids), push.pulled_rows[name]
                events = gradient[:, now.shape[1] :]
                gradient = self._caught_up(gradient[:, : now.shape[1]], now, pulled)
                gradient = np.concatenate([gradient, events], 1) if events.size else gradient
            self.store.update(name, ids, gradient, push.rates.get(name), push.limits.get(name))
        if push.dense is not None:
            gradient = push.dense
            if self.job.compensate and push.pulled_dense is not None:
                gradient = self._caught_up(gradient, self.store.dense.values(), push.pulled_dense)
            self.store.update_dense(gradient, push.groups)

    def _caught_up(self, gradient: Floats, now: Floats, pulled: Floats) -> Floats:
        """Return the gradient corrected to the current weights, to first order (DC-ASGD, Zheng et al. 2017)."""
        return gradient + np.float32(self.job.compensate) * gradient * gradient * (now - pulled)


class BoundedMode(AsyncMode):
    """Asynchronous updates in which no worker is more than ``staleness`` steps ahead of the slowest."""

    def missing(self, worker: int, step: int) -> dict[int, str]:
        memberships, lowest = self.members.memberships, step - self.job.staleness
        late = [other for other in self.members.live() if other != worker and memberships[other].seq + 1 < lowest]
        return {other: f"is at step {memberships[other].seq + 1}" for other in late}


class GeoMode(AsyncMode):
    """Geo mode: workers step on their own and send the changes."""

    def _apply(self, push: PushRequest) -> None:
        for name, ids in push.ids.items():
            self.store.add(name, ids, push.rows[name], push.limits.get(name))
        if push.dense is not None:
            self.store.add_dense(push.dense)


MODES: dict[str, type[UpdateMode]] = {"sync": SyncMode, "async": AsyncMode, "bounded": BoundedMode, "geo": GeoMode}
