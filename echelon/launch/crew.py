"""The processes of a job with parameter servers on this host: start them, and start again whichever dies.

A server comes back at its endpoint and restores its state; a worker comes back under its id and asks the servers where
it stood. Only workers that have joined torch.distributed are started again all together, as ranks are.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.environment import BOUND_MARK, RESTART_COUNT, RESTARTS
from echelon.launch import worker as worker_program
from echelon.launch.agent import GRACE, LOOK, JobFailed
from echelon.launch.failure import Failure, first_cause, read_record
from echelon.launch.guard import Guard, end_sessions
from echelon.launch.job import Job
from echelon.launch.meeting import WorkersStore
from echelon.launch.roles import Roles, Session, server_environment, worker_environments
from echelon.launch.signals import signals_held

#: Seconds for servers to end by themselves when all workers of the job have.
FAREWELL = 10.0


@dataclass
class Member:
    """One server or worker, over all its restarts."""

    role: str
    index: int
    count: int
    host: str
    command: Sequence[str]
    env: dict[str, str]
    log: Path
    record: Path
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def session(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        self.record.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            self.command,
            env=os.environ | self.env | {RESTARTS: str(self.restarts), "TORCHELASTIC_ERROR_FILE": str(self.record)},
            stdin=subprocess.DEVNULL if self.role == "server" else None,
            start_new_session=True,
        )

    def ask_to_end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def failure(self) -> Failure:
        code = self.exit_code
        assert code
        return Failure(
            rank=self.index,
            world_size=self.count,
            host=self.host,
            pid=self.session,
            exit_code=code,
            log=str(self.log),
            role=self.role,
            **read_record(self.record),
        )


def gather(job: Job, roles: Roles, session: Session, records: Path, guard: Guard) -> Crew:
    """The crew of this host, nobody started yet. What all inherit lies in our own environment."""
    host = socket.gethostname()
    serve = (worker_program.__file__, str(os.getpid()), str(job.log_dir), "module", "echelon.launch.server")

    def member(role: str, log: str, index: int, count: int, command: Sequence[str], env: dict[str, str]) -> Member:
        name = f"{log}-{index}"
        files = job.log_dir / f"{name}.log", records / f"{name}.json"
        return Member(role, index, count, host, (sys.executable, *command), env, *files)

    servers, workers = len(roles.endpoints), enumerate(worker_environments(roles), roles.first_trainer)
    return Crew(
        [member("server", "server", n, servers, serve, server_environment(roles, n, session)) for n in roles.servers],
        [member("worker", "rank", n, roles.trainers, job.command, env) for n, env in workers],
        guard=guard,
        meet=WorkersStore(job).open,
        bound=Path(os.environ[BOUND_MARK]),
        max_restarts=job.max_restarts,
        one_host=roles.one_host,
    )


class Crew:
    """``meet`` tells workers where they would meet, anew for every attempt; ``bound`` exists when they have met."""

    def __init__(
        self,
        servers: list[Member],
        workers: list[Member],
        *,
        guard: Guard,
        meet: Callable[[], dict[str, str]],
        bound: Path,
        max_restarts: int,
        one_host: bool,
    ) -> None:
        self._servers, self._workers = servers, workers
        self._guard, self._meet, self._bound = guard, meet, bound
        self._max_restarts, self._one_host = max_restarts, one_host
        self._attempt = 0

    def run(self) -> None:
        """Until every worker, and every server of workers elsewhere, is done; raises ``JobFailed``."""
        try:
            self._tell_workers()
            self._start(self._all)
            while not self._done():
                time.sleep(LOOK)
                self._mend()
            _await_end(self._servers, FAREWELL)
        except BaseException:
            self._end(self._all)
            raise
        self._end(self._servers)

    @property
    def _all(self) -> list[Member]:
        return self._servers + self._workers

    def _done(self) -> bool:
        """Servers may end when the workers of this host have, but for those on other hosts they stay."""
        awaited = self._workers if self._one_host else self._all
        return all(member.exit_code == 0 for member in awaited)

    def _mend(self) -> None:
        """Start again whoever has failed; end the job when that makes no sense any more."""
        failures = {member.name: member.failure() for member in self._all if member.exit_code}
        if any(not self._may_return(member, failures[member.name]) for member in self._all if member.name in failures):
            raise JobFailed(first_cause(failures.values()))
        for server in self._servers:
            if server.name in failures:
                self._restart(server, failures[server.name])
        fallen = [worker for worker in self._workers if worker.name in failures]
        if fallen and self._bound.exists():
            self._restart_workers(first_cause(failures[worker.name] for worker in fallen))
        else:
            for worker in fallen:
                self._restart(worker, failures[worker.name])

    def _may_return(self, member: Member, failure: Failure) -> bool:
        """What is explained in one line would come again, unless it only tells of a lost fellow."""
        together = member.role == "worker" and self._bound.exists()
        if failure.explained and not (together and failure.secondary):
            return False
        if member.role == "worker" and not together and any(server.exit_code == 0 for server in self._servers):
            return False  # all had taken leave, and what it trained with is gone
        return (self._attempt if together else member.restarts) < self._max_restarts

    def _restart(self, member: Member, failure: Failure) -> None:
        member.restarts += 1
        _say(f"restarting {member.name} (restart {member.restarts} of {self._max_restarts}) because it {failure.how}")
        end_sessions([member.session])  # its children
        self._start([member])

    def _restart_workers(self, failure: Failure) -> None:
        self._attempt += 1
        which = f"restart {self._attempt} of {self._max_restarts}"
        _say(f"restarting all workers ({which}) because {failure.who} {failure.how}")
        self._end(self._workers)
        self._bound.unlink(missing_ok=True)
        for worker in self._workers:
            worker.restarts += 1
        self._tell_workers()
        # Servers that had ended because all had taken leave are needed again
        self._start([server for server in self._servers if server.exit_code == 0] + self._workers)

    def _tell_workers(self) -> None:
        meeting = self._meet()
        for worker in self._workers:
            worker.env |= {**meeting, RESTART_COUNT: str(self._attempt)}

    def _start(self, members: Iterable[Member]) -> None:
        with signals_held():
            for member in members:
                member.start()
            self._guard.watch([member.session for member in self._all if member.session])

    def _end(self, members: list[Member]) -> None:
        """Ask them to end, kill those that do not, then whatever they left running in their sessions."""
        with signals_held():
            for member in members:
                member.ask_to_end()
            _await_end(members, GRACE)
            end_sessions(member.session for member in members if member.session)


def _await_end(members: list[Member], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(member.session and member.exit_code is None for member in members) and time.monotonic() < deadline:
        time.sleep(LOOK / 5)


def _say(line: str) -> None:
    print(f"echelon: {line}", file=sys.stderr, flush=True)
