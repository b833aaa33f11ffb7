"""``ServerConnections``: a worker's channels to its servers, their heartbeats, and the lines printed while it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from echelon.base.errors import PeerLost
from echelon.base.wait_notice import WaitNotice
from echelon.distributed.ps_role import Role
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.protocol.message import WireMessage

if TYPE_CHECKING:
    from echelon.parameter_server.protocol.channel import HeartbeatSender, ServerChannel


class ServerConnections:
    """A channel to each server of the job, or to a server inside this process if the job has none.

    timeout:  seconds that a server may be away after it has answered once
    """

    def __init__(self, role: Role, job: JobSpec, timeout: float) -> None:
        self._role, self._job = role, job
        self._beats: HeartbeatSender | None = None
        self.links: Sequence[Any] = self._connect(timeout) if role.endpoints else _own_link()

    def _connect(self, timeout: float) -> list[ServerChannel]:
        from echelon.base.security import Security
        from echelon.parameter_server.protocol.channel import ServerChannel

        security = Security.from_environment().for_loopback(self._role.endpoints)
        return [
            ServerChannel(
                endpoint,
                hello=partial(self._greet, index),
                security=security,
                timeout=timeout,
                join=self._role.join_timeout,
                name=f"server {index}",
            )
            for index, endpoint in enumerate(self._role.endpoints)
        ]

    def _greet(self, index: int, call: Callable[[WireMessage], WireMessage]) -> None:
        """Check, after a lost connection, that the server still has the job's state; open the job if it had none yet.

        Raises ``PeerLost`` if the server has lost its state.
        """
        session = self._job.session
        known = call(WireMessage({"op": "hello", "worker": -1, "session": session})).head
        is_open = known.get("opened") and known.get("session") == session
        if is_open and (known.get("begun") or not self.links[index].holds_state):
            return
        if self.links[index].holds_state:  # another worker may have opened the job there again
            raise PeerLost(
                f"server {index} has restarted without its state (its journal is off or lost); start the job again: it "
                "goes on from the last checkpoint. ParameterServer(journal=True), or replica=True for lost hosts, "
                "prevents it"
            )
        call(WireMessage({"op": "open", "worker": self._role.index, "job": self._job.to_json()}))

    # ---- waiting ----

    def report_waits(self) -> AbstractContextManager[None]:
        """Print the servers that have not answered while the caller waits inside the context."""
        if not self._role.endpoints:
            return nullcontext()
        notice = WaitNotice(self._me, self._role.join_timeout, "start the missing processes", component="ps")
        return notice.during(self._unanswered)

    def _unanswered(self) -> str:
        waited = [link for link in self.links if link.waits_for()]
        return ", ".join(f"{link.name} at {link.endpoint} ({link.trouble or 'it is starting'})" for link in waited)

    @property
    def _me(self) -> str:
        return f"worker {self._role.index} of {self._role.workers}"

    # ---- heartbeats ----

    def keep(self) -> None:
        """Start heartbeats to the servers; their answers name missing workers, or the reason why a server ends."""
        if not self._role.endpoints:
            return
        from echelon.base.security import Security
        from echelon.parameter_server.protocol.channel import HeartbeatSender

        self._missing = WaitNotice(self._me, self._role.join_timeout, "start the missing processes", component="ps")
        self._begin = WaitNotice(self._me, None, component="ps")
        security = Security.from_environment().for_loopback(self._role.endpoints)
        self._beats = HeartbeatSender(
            self._role.endpoints, self._role.index, security, links=self.links, hear=self._hear
        )

    def _hear(self, endpoint: str, answer: dict[str, Any]) -> None:
        if answer.get("ending"):
            link = next(link for link in self.links if link.endpoint == endpoint)
            link.give_up(PeerLost(str(answer["ending"])))
        self._missing.poll(str(answer.get("missing") or ""))
        self._begin.poll(str(answer.get("unbegun") or ""))

    def close(self) -> None:
        """Stop the heartbeats; the client that uses the channels closes them."""
        if self._beats is not None:
            self._beats.close()


@contextmanager
def announce_worker(role: Role) -> Iterator[None]:
    """Send heartbeats to the servers while the worker joins the other workers inside the context."""
    if not role.endpoints:
        yield
        return
    from echelon.base.security import Security
    from echelon.parameter_server.protocol.channel import HeartbeatSender

    beats = HeartbeatSender(role.endpoints, role.index, Security.from_environment().for_loopback(role.endpoints))
    try:
        yield
    finally:
        beats.close()


def _own_link() -> list[Any]:
    from echelon.parameter_server.worker.in_process import InProcessChannel, own_shard

    return [InProcessChannel(own_shard().handle)]
