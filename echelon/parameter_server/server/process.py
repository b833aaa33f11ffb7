"""A server process: listens, holds its shard of the job that workers open, and ends when the workers are done.

    python -m echelon.parameter_server.server.process          configured by the environment ('echelon run' sets it)
    python -m echelon.parameter_server.server.process --pservers A:1,B:1 --endpoint B:1 --trainers 4 --state DIR

Exit codes: 0 the workers are done, 1 the workers never connected or fell silent, 2 wrong arguments, 128 + n signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from echelon.base.console import say
from echelon.base.environment import PS_STATE, RESTARTS
from echelon.base.errors import CheckpointError, EchelonError, PeerLost, UsageError
from echelon.base.security import Security
from echelon.base.wait_notice import WaitNotice
from echelon.distributed.ps_role import Role, find_role
from echelon.parameter_server.persistence.find_job import SESSION, find_job, next_epoch
from echelon.parameter_server.persistence.persistence import ShardPersistence, home_of
from echelon.parameter_server.persistence.replication import ReplicaHost
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.server_log import ServerLog
from echelon.parameter_server.server.server_peers import PATIENCE, ServerPeers
from echelon.parameter_server.server.server_port import ServerPort
from echelon.parameter_server.server.shard import ServerShard
from echelon.parameter_server.server.worker_arrivals import WorkerArrivals

#: Seconds between two checks of the workers.
LOOK = 0.1
#: Requests that are answered while the server still restores its state, because they do not depend on it.
UNGATED = ("beat", "stats", "mirror", "mirrored")
#: Seconds for clients to hang up after the last worker has left.
FAREWELL = 5.0
#: Seconds that a restarted server waits for its port.
PORT_WAIT = 10.0
#: Seconds for workers to learn why a server ends, before it ends; more than the time between two heartbeats.
LAST_WORD = 2.5


def serve(role: Role, *, state: Path | None = None, security: Security | None = None) -> int:
    """Run server ``role.index`` until the workers are done (0) or a signal comes (128 + its number).

    Raises ``PeerLost`` when workers do not come or fall silent.

    state:  directory for state that outlives this process; None: taken from the environment, else no persistence
    """
    security = security or Security.from_environment(token=role.token or None)
    security = security.for_loopback(role.endpoints, serves=True)
    state = state or (Path(os.environ[PS_STATE]) if os.environ.get(PS_STATE) else None)
    _without_helpers()
    process = ParameterServerProcess(role, state, security)
    with _signals(process.stop):
        return process.hold()


def _without_helpers() -> None:
    """Limit torch to one thread: each stream's thread would start its own OpenMP pool and take CPUs from workers."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # torch is imported later, or never
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


class ParameterServerProcess:
    """A running server: its port, its shard, and the supervision of its workers."""

    def __init__(self, role: Role, state: Path | None, security: Security) -> None:
        self._role, self._state = role, state
        self._peers = ServerPeers(role.endpoints, security)
        self._stop, self._revived, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._code = 0
        keep = self._open_persistence if state is not None else None
        self.shard = ServerShard(role.index, len(role.endpoints), ask=self._peers.ask, directory=state, keep=keep)
        self._arrivals, self._reason = WorkerArrivals(role, self.shard), ""
        restarted = os.environ.get(RESTARTS, "0") != "0"  # the port was free: a job does not end because it is not now
        wait = PORT_WAIT if restarted else 0.0
        # The port comes after all that _handle uses: workers call before the constructor has returned.
        self._server = ServerPort(role.endpoints[role.index], self._handle, security, wait=wait)
        self._figures = ServerLog(role.index, self.shard, lambda: self._server.traffic)

    def hold(self) -> int:
        """Serve until the workers are done or a signal comes, and return the exit code."""
        count = len(self._role.endpoints)
        say(f"server {self._role.index} of {count} is ready at {self._server.endpoint}", stdout=True)
        try:
            self._revive()
            while not self._stop.wait(LOOK) and not self.shard.done():
                if self.shard.superseded:
                    raise CheckpointError(self.shard.superseded)
                self._arrivals.check()
                self._figures.write_if_due()
        except EchelonError as error:
            self._reason = str(error)
            self._tell_reason()
            raise
        finally:
            self._figures.close()
            self._leave()
        return self._code

    def stop(self, number: int) -> None:
        """End because of this signal; the stored state stays, so that the next process can resume from it."""
        self._code = 128 + number
        self._reason = f"server {self._role.index} was stopped by {signal.Signals(number).name}"
        self._stop.set()

    def _handle(self, frame: WireMessage, has_hung_up: Callable[[], bool]) -> WireMessage:
        """Answer a request; workers wait until the server has restored an earlier state of their job, if any."""
        op, worker = frame.head.get("op"), frame.head.get("worker")
        if op in ("hello", "beat"):
            self._arrivals.record_arrival(worker)
        if self._ending.is_set():
            self._arrivals.tell(worker)
            if op == "beat":
                return WireMessage({"ok": True, "ending": self._reason})
            raise PeerLost(self._reason)
        if op == SESSION:
            return WireMessage({"ok": True, SESSION: self.shard.job.session if self.shard.opened else None})
        if op == "mirrored" and self._state is not None and not self._is_kept(frame.head.get(SESSION)):
            return ReplicaHost(self._home(str(frame.head.get(SESSION)))).handle(frame)
        while op not in UNGATED and not self._revived.wait(LOOK):
            if has_hung_up() or self._stop.is_set():
                raise PeerLost(f"server {self._role.index} had not finished starting")
        answer = self.shard.handle(frame, has_hung_up)
        if self._ending.is_set():
            self._arrivals.tell(worker)
        return WireMessage({**answer.head, **self._arrivals.pending()}) if op == "beat" else answer

    def _tell_reason(self) -> None:
        """Wait until the workers, which send a request or heartbeat every few seconds, know why this server ends."""
        self._ending.set()
        self.shard.dismiss(self._reason)
        deadline = time.monotonic() + LAST_WORD
        while self._server.streams and self._arrivals.has_uninformed() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _revive(self) -> None:
        """Restore the job of an earlier process of this server."""
        if self._state is not None:
            me = f"server {self._role.index}"
            with WaitNotice(me, PATIENCE, component="ps").during(self._holder):
                job = find_job(self._state, self._role.index, self._neighbour())
            if job is not None and job["servers"] == len(self._role.endpoints):
                answer = self.shard.handle(WireMessage({"op": "open", "worker": -1, "job": job}))
                if "error" in answer.head:
                    raise EchelonError(answer.head["error"])
        self._revived.set()

    def _leave(self) -> None:
        """Close the channels to other servers, wait briefly for them to do the same, then end.

        The wait is needed because a neighbor may still write its replica here.
        """
        done = self.shard.done()
        self._peers.close()
        deadline = time.monotonic() + (FAREWELL if done else 0.0)
        while self._server.streams and time.monotonic() < deadline:
            time.sleep(0.01)
        self.shard.close(self._reason)
        if done and self._state is not None:
            shutil.rmtree(self._home(self.shard.job.session), ignore_errors=True)  # no process will resume it
        self._server.close()

    # ---- persistence ----

    def _open_persistence(self, shard: Any) -> ShardPersistence:
        assert self._state is not None
        home, epoch = self._home(shard.job.session), next_epoch(self._state, self._role.index)
        return ShardPersistence(shard, home, shard.job.keeping, self._neighbour(), epoch=epoch)

    def _is_kept(self, session: Any) -> bool:
        """Return True if the shard has the state of this session; before, its files lie on the disk alone."""
        return self.shard.persistence is not None and self.shard.job.session == session

    def _neighbour(self) -> Callable[[WireMessage], WireMessage] | None:
        """Return a function that asks the server with the replica of this one; None if there is only one server."""
        count = len(self._role.endpoints)
        return partial(self._peers.ask, (self._role.index + 1) % count) if count > 1 else None

    def _holder(self) -> str:
        """Return a description of the server that ``_neighbour`` asks; '' if there is none."""
        holder = (self._role.index + 1) % len(self._role.endpoints)
        return (
            ""
            if holder == self._role.index
            else f"server {holder} at {self._role.endpoints[holder]}, which may hold its replica"
        )

    def _home(self, session: str) -> Path:
        assert self._state is not None
        return home_of(self._state, session, self._role.index)


@contextlib.contextmanager
def _signals(stop: Any) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and SIGINT inside the context, for an orderly end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, _: stop(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(code: int) -> NoReturn:
    """Exit at once: Python's normal exit would wait for threads that only clients end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server process from command-line arguments; an error is printed as one line on stderr."""
    logging.basicConfig(format="echelon: %(message)s")
    try:
        given = _parser().parse_args(argv)
        security = Security.from_environment()
        role = find_role(
            role="server",
            pservers=given.pservers,
            current_endpoint=given.endpoint,
            trainers=given.trainers,
            join_timeout=given.join_timeout,
            token=security.token,
        )
        return serve(role, state=given.state, security=security)
    except EchelonError as error:
        say(str(error))
        return 2 if isinstance(error, UsageError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m echelon.parameter_server.server.process", description="One parameter server of a job."
    )
    parser.add_argument("--pservers", help="HOST:PORT of every server, with commas, the same everywhere")
    parser.add_argument("--endpoint", help="HOST:PORT of this server, one of --pservers")
    parser.add_argument("--trainers", type=int, help="number of workers of the job")
    parser.add_argument("--state", type=Path, help="directory for state that outlives the process")
    parser.add_argument("--join-timeout", type=float, help="seconds to wait for the workers")
    return parser


if __name__ == "__main__":
    end(main())
