"""``WorkerArrivals``: the workers that have connected to a server, and the end of the wait for the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from echelon.base.endpoints import split_endpoint
from echelon.base.errors import PeerLost
from echelon.base.wait_notice import WaitNotice, name_ranks
from echelon.distributed.ps_role import Role
from echelon.parameter_server.server.shard import ServerShard

#: Seconds for another server to accept a connection before it counts as missing.
PROBE = 0.5


class WorkerArrivals:
    """The workers that one server waits for after its start."""

    def __init__(self, role: Role, shard: ServerShard) -> None:
        self._role, self._shard = role, shard
        self._me, self._began = f"server {role.index}", time.monotonic()
        self._greeted: set[int] = set()
        self._informed: set[int] = set()
        self._notice = WaitNotice(self._me, role.join_timeout, component="ps")

    def record_arrival(self, worker: Any) -> None:
        """Record a worker that has sent ``hello`` or a heartbeat, which it does before it opens the job."""
        if isinstance(worker, int) and worker >= 0:
            self._greeted.add(worker)

    def check(self) -> None:
        """Print the workers that this server waits for, when it is time. Raises ``PeerLost`` when the wait is over."""
        waited, patience = time.monotonic() - self._began, self._role.join_timeout
        if not self._shard.opened:
            if waited > patience:
                raise PeerLost.never_came(f"{self._me} has waited {patience:g} s {self._end_unopened()}")
            self._notice.poll(self._awaited_unopened())
            return
        missing = self._missing()
        if missing and waited > patience:
            end = f"start {_it(missing)}, or fewer with trainers="
            raise PeerLost.never_came(
                f"{self._me} has waited {patience:g} s for {name_ranks(set(missing), 'worker')}; {end}"
            )
        self._notice.poll(_to_come(missing))
        self._check_silence()

    def _check_silence(self) -> None:
        live, beats = self._shard.members.live(), self._shard.heartbeats
        silence = min((beats.silence(worker) for worker in live), default=0.0)
        if silence > max(self._role.join_timeout, self._shard.job.patience):
            raise PeerLost(
                f"{self._me} has heard nothing of {name_ranks(set(live), 'worker')} for {silence:.0f} s; "
                "start the job again to go on from here"
            )

    def _missing(self) -> list[int]:
        return [worker for worker in self._shard.members.live() if not self._shard.heartbeats.has_heard(worker)]

    # ---- before a worker has opened the job ----

    def _absent(self) -> set[int]:
        return set(range(self._role.workers)) - self._greeted

    def _awaited_unopened(self) -> str:
        if absent := self._absent():
            return _to_come(absent)
        return f"{self._absent_servers()}, as its workers do"

    def _end_unopened(self) -> str:
        if not self._greeted:
            return f"and no worker has opened a job; start the {_workers(self._role.workers)}"
        if absent := self._absent():
            return f"for {name_ranks(absent, 'worker')}; start {_it(absent)}, or fewer with trainers="
        return f"and no worker has opened a job: all of them wait for {self._absent_servers()}; start it"

    def _absent_servers(self) -> str:
        others = [(n, end) for n, end in enumerate(self._role.endpoints) if n != self._role.index]
        absent = [f"server {n} at {end}" for n, end in others if not _accepts(end)]
        return ", ".join(absent) or "another server"

    # ---- for the workers ----

    def pending(self) -> dict[str, str]:
        """Return the news in the answer to a heartbeat: workers that are missing, and missing initial values."""
        if not self._shard.opened:
            return {}
        missing = self._missing()
        begun = self._shard.store.begun or 0 in missing
        return {
            "missing": _to_come(missing),
            "unbegun": "" if begun else "worker 0 to send the initial values",
        }

    def tell(self, worker: Any) -> None:
        """Record a worker that has been told why this server ends."""
        self._informed.add(worker)

    def has_uninformed(self) -> bool:
        """Return True if a worker with a recent heartbeat does not know yet that this server ends."""
        if not self._shard.opened:
            return False
        beats = self._shard.heartbeats
        return any(
            beats.has_heard(worker)
            and worker not in self._informed
            and beats.silence(worker) < self._shard.job.patience
            for worker in self._shard.members.live()
        )


def _to_come(workers: Sequence[int] | set[int]) -> str:
    return f"{name_ranks(set(workers), 'worker')} to call echelon.distribute()" if workers else ""


def _workers(count: int) -> str:
    return "worker" if count == 1 else f"{count} workers"


def _it(workers: Sequence[int] | set[int]) -> str:
    return "it" if len(workers) == 1 else "them"


def _accepts(endpoint: str) -> bool:
    host, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=PROBE):
            return True
    except OSError:
        return False
