"""Coordination of membership between the servers of a job: server 0 decides which workers are dropped or admitted.

A worker sends each server a separate commit of its push, so when the worker dies some servers may have the commit and
others not. Server 0 therefore fences the worker first: every server refuses further requests of the worker and reports
its last committed step. The largest of these steps is the last one that the worker took part in, on all servers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echelon.base.errors import EchelonError, PeerLost
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.protocol.request import RequestError

if TYPE_CHECKING:
    from echelon.parameter_server.server.shard import ServerShard

log = logging.getLogger("echelon.parameter_server")

#: Sends a message to another server of the job and returns its answer.
Ask = Callable[[int, WireMessage], WireMessage]


class MembershipCoordinator:
    """One server's part in the coordination. No thread takes the coordinator's lock while it holds the shard's lock."""

    def __init__(self, shard: ServerShard, ask: Ask | None) -> None:
        self._shard, self._ask_server = shard, ask
        self._deciding = threading.RLock()
        self._next_query: dict[int, float] = {}

    # ---- while a request waits ----

    def drop_silent_workers(self, missing: dict[int, str], what: str, waited: float) -> None:
        """Drop the missing workers that have been silent for too long. Raises ``PeerLost`` when waiting cannot help."""
        if missing == {-1: "a worker is joining"}:
            self._thaw_if_left()
        for worker, why in missing.items():
            if worker >= 0:
                self._look_after(worker, f"worker {worker} {why}", what, waited)

    def _look_after(self, worker: int, why: str, what: str, waited: float) -> None:
        shard, patience = self._shard, self._shard.job.patience
        silent = shard.heartbeats.silence(worker)
        if silent < patience:
            return
        waited_for = f"server {shard.server} has waited {waited:.0f} s for {what}: {why}"
        if not shard.store.begun:
            raise PeerLost(f"{waited_for} and has been silent for {silent:.0f} s; start it again")
        if not shard.heartbeats.has_heard(worker) and shard.server == 0:
            if waited >= patience:
                raise PeerLost(f"{waited_for} and has never sent a heartbeat; start it, or the job with fewer workers")
            return
        if not shard.members.is_live(worker):
            raise PeerLost(
                f"{waited_for}, although it has left; this server has lost that worker's state: start from a checkpoint"
            )
        try:
            self._settle_fate(worker)
        except EchelonError as error:
            if silent >= 2 * patience:
                raise PeerLost(f"{waited_for} and cannot be dropped ({error})") from None

    def _settle_fate(self, worker: int) -> None:
        if not self._deciding.acquire(blocking=False):
            return  # another thread is deciding
        try:
            if self._shard.server == 0:
                self._drop(worker)
            elif self._shard.heartbeats.clock() >= self._next_query.get(worker, 0.0):
                self._next_query[worker] = self._shard.heartbeats.clock() + self._shard.job.patience / 10
                self._follow(worker, self._ask(0, {"op": "verdict", "worker": worker, "step": self._shard.version}))
        finally:
            self._deciding.release()

    def _follow(self, worker: int, verdict: dict[str, Any]) -> None:
        if not verdict["member"]:
            self._change({"op": "drop", "worker": worker, "last": int(verdict["last"])})

    def _thaw_if_left(self) -> None:
        """Thaw server 0 if it was restarted while it was frozen for a joining worker: no other thread would."""
        if self._deciding.acquire(blocking=False):
            try:
                self._change({"op": "thaw", "worker": -1})
            finally:
                self._deciding.release()

    # ---- server 0 ----

    def verdict(self, worker: int) -> dict[str, Any]:
        """Drop ``worker`` if it is silent here, too, and return its membership. Other servers ask this of server 0."""
        shard = self._shard
        with self._deciding:
            if shard.members.is_live(worker) and shard.heartbeats.silence(worker) >= shard.job.patience:
                if not shard.heartbeats.has_heard(worker):
                    raise PeerLost(
                        f"worker {worker} has never sent a heartbeat; start it, or the job with fewer workers"
                    )
                self._drop(worker)
            return {"member": shard.members.is_live(worker), "last": shard.members.last_step(worker)}

    def _drop(self, worker: int) -> None:
        """Drop a worker on all servers; a server that cannot be told now learns it when it asks for the verdict."""
        shard, others = self._shard, range(1, self._shard.servers)
        if not shard.members.is_live(worker):
            return
        fenced = [self._change({"op": "fence", "worker": worker})]
        fenced += [self._ask(server, {"op": "fence", "worker": worker}) for server in others]
        verdict = {"op": "drop", "worker": worker, "last": max(int(answer["committed"]) for answer in fenced)}
        self._change(verdict)
        silent = shard.heartbeats.silence(worker)
        log.warning("worker %d has been silent for %.0f s and is left out; the others go on without it", worker, silent)
        for server in others:
            self._ask(server, verdict)

    def join(self, worker: int) -> dict[str, Any]:
        """Let a new or a dropped worker take part from the next step on, which is the same step on all servers.

        Meanwhile server 0 applies nothing: no worker gets the weights for the step after the next one, so that no
        server can have passed it when it learns of the joining worker.
        """
        shard = self._shard
        if shard.server != 0:
            raise RequestError(f"worker {worker} asked server {shard.server} to join; server 0 lets workers join")
        with self._deciding:
            self._drop(worker)
            entry = self._change({"op": "freeze", "worker": worker})
            try:
                entering = {"op": "enter", "worker": worker, "step": entry["step"], "last": entry["last"]}
                for server in range(1, shard.servers):
                    self._ask(server, entering)
                self._change(entering)
            finally:
                self._change({"op": "thaw", "worker": worker})
        return {"step": entry["step"], "version": entry["version"]}

    # ---- internal ----

    def _change(self, head: dict[str, Any]) -> dict[str, Any]:
        return self._shard.change(self._shard.stamped(WireMessage(head)))

    def _ask(self, server: int, head: dict[str, Any]) -> dict[str, Any]:
        if self._ask_server is None:
            raise PeerLost(f"server {self._shard.server} has no connection to server {server}")
        answer = self._ask_server(server, WireMessage(dict(head))).head
        if "error" in answer:
            raise EchelonError(str(answer["error"]))
        return answer
