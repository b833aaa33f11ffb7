"""``ParameterServerJob``: the processes of a job with parameter servers on this host, each restarted when it dies.

A restarted server listens at its endpoint and restores its state; a restarted worker keeps its id and asks the servers
for its position. Only workers that have joined torch.distributed are restarted all together, as ranks are.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.base.console import say
from echelon.base.environment import BOUND_MARK, REQUEUE, RESTART_COUNT
from echelon.distributed import rank_main as worker_program
from echelon.launcher.agent import GRACE, LOOK, NO_GRACE, HostPreempted, JobFailed
from echelon.launcher.failure import Failure, first_cause
from echelon.launcher.graceful_stop import GracefulStopMarkers, all_stopped_gracefully, request_graceful_stop
from echelon.launcher.job import Job
from echelon.launcher.managed_process import ManagedProcess, await_end
from echelon.launcher.orphan_reaper import OrphanReaper, end_sessions
from echelon.launcher.rendezvous.messages import host_failure
from echelon.launcher.rendezvous.open_rendezvous import WorkersStore
from echelon.launcher.role_assignment import JobSession, ParameterServerRoles, server_environment, worker_environments
from echelon.launcher.signals import StopNotice, signals_held
from echelon.launcher.stall_plugin import process_state
from echelon.launcher.startup_wait_plugin import StartupWaitPlugin
from echelon.observability.runlog.events import note_beside

#: Seconds for servers to end by themselves after all workers of the job have ended.
FAREWELL = 10.0
#: Seconds to wait for the end of the process that others lost contact with, so that its failure is reported.
FIRST_CAUSE_WAIT = 5.0
#: States of a process stopped by a signal or by a debugger; see proc(5).
STOPPED = ("T", "t")
#: Seconds between two checks after which this process was probably stopped itself, with the others: start over.
BLIND = 5.0


def create_ps_job(
    job: Job, roles: ParameterServerRoles, session: JobSession, records: Path, reaper: OrphanReaper
) -> ParameterServerJob:
    """Create the job of this host without starting processes. Common variables are in the launcher's environment."""
    host = socket.gethostname()
    serve = (worker_program.__file__, str(os.getpid()), str(job.log_dir), "module", "echelon.launcher.server_main")

    def member(
        role: str, log: str, index: int, count: int, command: Sequence[str], env: dict[str, str]
    ) -> ManagedProcess:
        name = f"{log}-{index}"
        files = job.log_dir / f"{name}.log", records / f"{name}.json"
        variables = env | waits.environment()
        return ManagedProcess(role, index, count, host, (sys.executable, *command), variables, *files)

    marks, waits = GracefulStopMarkers(records), StartupWaitPlugin(records, say)
    servers, workers = len(roles.endpoints), enumerate(worker_environments(roles), roles.first_trainer)
    return ParameterServerJob(
        [member("server", "server", n, servers, serve, server_environment(roles, n, session)) for n in roles.servers],
        [member("worker", "rank", n, roles.trainers, job.command, env | marks.environment) for n, env in workers],
        reaper=reaper,
        open_store=WorkersStore(job).open,
        bound=Path(os.environ[BOUND_MARK]),
        max_restarts=job.max_restarts,
        one_host=roles.one_host,
        marks=marks,
        grace=job.options.grace,
        stopped_processes=StoppedProcesses(job.options.stall if job.options.on_stall == "end" else 0.0),
        waits=waits,
    )


class StoppedProcesses:
    """Detects processes that are stopped for too long: after SIGSTOP a process cannot report it itself.

    limit:  seconds that a process may be stopped; 0: no limit
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: dict[int, float] = {}
        self._polled_at = time.monotonic()

    def overdue(self, pids: Iterable[int]) -> list[int]:
        """Return the processes that were stopped at every check for longer than the limit."""
        if self.limit <= 0:
            return []
        now = time.monotonic()
        known = self._since if now - self._polled_at < BLIND else {}
        self._polled_at = now
        self._since = {pid: known.get(pid, now) for pid in pids if process_state(pid) in STOPPED}
        return [pid for pid, since in self._since.items() if now - since > self.limit]


class ParameterServerJob:
    """The servers and workers of this host.

    open_store:        returns the endpoint for torch.distributed as variables, new for every attempt
    bound:             file that exists once the workers have joined torch.distributed
    marks, grace:      markers of workers that can save and exit on request, and seconds that they get for it
    stopped_processes: detects processes that are stopped for too long
    waits:             prints the lines of processes that wait for others at startup
    """

    def __init__(
        self,
        servers: list[ManagedProcess],
        workers: list[ManagedProcess],
        *,
        reaper: OrphanReaper,
        open_store: Callable[[], dict[str, str]],
        bound: Path,
        max_restarts: int,
        one_host: bool,
        marks: GracefulStopMarkers,
        grace: float,
        stopped_processes: StoppedProcesses,
        waits: StartupWaitPlugin,
    ) -> None:
        self._servers, self._workers = servers, workers
        self._reaper, self._open_store, self._bound = reaper, open_store, bound
        self._max_restarts, self._one_host = max_restarts, one_host
        self._marks, self._grace, self._stopped_processes, self._waits = marks, grace, stopped_processes, waits
        self._notice = StopNotice()
        self._attempt = 0

    def run(self) -> None:
        """Run until all workers, and servers of remote workers, are done; raise JobFailed or HostPreempted."""
        try:
            self._notify_workers()
            self._start(self._all)
            with self._notice.handled():
                self._watch()
            await_end(self._servers, FAREWELL, LOOK / 5)
        except BaseException:
            self._end(self._all)
            raise
        self._end(self._servers)
        if any(worker.exit_code for worker in self._workers):
            raise JobFailed(host_failure(socket.gethostname(), "has saved and requests a restart", REQUEUE))

    def _watch(self) -> None:
        while not self._done():
            time.sleep(LOOK)
            if self._notice.given is not None:
                self._leave(self._notice.given)
            self._give_up_stopped()
            self._waits.poll()
            self._mend()

    @property
    def _all(self) -> list[ManagedProcess]:
        return self._servers + self._workers

    def _done(self) -> bool:
        """Return True if the workers have ended, and the servers too if they also serve workers of other hosts."""
        awaited = [] if self._one_host else self._servers
        return all_stopped_gracefully(self._codes()) and all(server.exit_code == 0 for server in awaited)

    def _codes(self) -> list[int | None]:
        return [worker.exit_code for worker in self._workers]

    # Preemption

    def _leave(self, number: signal.Signals) -> NoReturn:
        """Leave after a signal. Workers that can save get the time for it, and their servers stay for them."""
        stopped = SignalException(f"stopped by {number.name}", number)
        if not self._can_leave():
            raise stopped
        deadline = time.monotonic() + self._grace
        running = [worker.session for worker in self._workers if worker.exit_code is None]
        if not request_graceful_stop(running, self._codes, self._grace):
            raise stopped
        # Workers of other hosts, probably preempted too, may still be saving with the servers of this host
        await_end(self._servers, FAREWELL if self._one_host else deadline - time.monotonic(), LOOK / 5)
        raise HostPreempted(number, goes_on=False)

    def _can_leave(self) -> bool:
        return any(self._marks.has(worker.index) for worker in self._workers)

    # Restarts

    def _give_up_stopped(self) -> None:
        running = {member.session: member for member in self._all if member.exit_code is None}
        for pid in self._stopped_processes.overdue(running):
            running[pid].give_up(f"for {self._stopped_processes.limit:g} s (stopped by SIGSTOP)")

    def _mend(self) -> None:
        """Restart failed processes; end the job if that is pointless or not allowed any more."""
        failures = self._failures()
        if any(not self._may_return(member, failures[member.name]) for member in self._all if member.name in failures):
            raise JobFailed(self._first_cause())
        for server in self._servers:
            if server.name in failures:
                self._restart(server, failures[server.name])
        fallen = [worker for worker in self._workers if worker.name in failures]
        if fallen and self._bound.exists():
            self._restart_workers(first_cause(failures[worker.name] for worker in fallen))
        else:
            for worker in fallen:
                self._restart(worker, failures[worker.name])

    def _failures(self) -> dict[str, Failure]:
        return {member.name: member.failure() for member in self._all if _has_failed(member)}

    def _first_cause(self) -> Failure:
        """Return the failure to report; if all failures are secondary, wait for the process that caused them to end.

        A server tells its workers the reason before it ends, and on a busy host the workers may end first.
        """
        deadline = time.monotonic() + FIRST_CAUSE_WAIT
        while (cause := first_cause(self._failures().values())).secondary and time.monotonic() < deadline:
            if all(member.exit_code is not None for member in self._all):
                break
            time.sleep(LOOK)
        return cause

    def _may_return(self, member: ManagedProcess, failure: Failure) -> bool:
        """Return True if it may restart. A failure explained in one line would recur, unless it is only a lost peer."""
        together = member.role == "worker" and self._bound.exists()
        if failure.explained and not (together and failure.secondary):
            return False
        if member.role == "worker" and not together and any(server.exit_code == 0 for server in self._servers):
            return False  # all workers had finished, and the servers it trained with have ended
        return (self._attempt if together else member.restarts) < self._max_restarts

    def _restart(self, member: ManagedProcess, failure: Failure) -> None:
        member.restarts += 1
        _print(f"restarting {member.name} (restart {member.restarts} of {self._max_restarts}) because it {failure.how}")
        end_sessions([member.session])  # kills its children
        self._start([member])

    def _restart_workers(self, failure: Failure) -> None:
        self._attempt += 1
        which = f"restart {self._attempt} of {self._max_restarts}"
        _print(f"restarting all workers ({which}) because {failure.who} {failure.how}")
        self._end(self._workers)
        self._bound.unlink(missing_ok=True)
        for worker in self._workers:
            worker.restarts += 1
        self._notify_workers()
        # Servers that had ended because all workers had finished are needed again
        self._start([server for server in self._servers if server.exit_code == 0] + self._workers)

    def _notify_workers(self) -> None:
        store_variables = self._open_store()
        for worker in self._workers:
            worker.env |= {**store_variables, RESTART_COUNT: str(self._attempt)}

    def _start(self, members: Iterable[ManagedProcess]) -> None:
        with signals_held():
            for member in members:
                if member.role == "worker":
                    self._marks.forget(member.index)
                member.start()
            self._reaper.watch([member.session for member in self._all if member.session])

    def _end(self, members: list[ManagedProcess]) -> None:
        """Terminate processes, kill those that remain, then kill other processes in their sessions."""
        with signals_held():
            for member in members:
                member.ask_to_end()
            # Workers that save on SIGTERM cannot save any more, so they get less time
            hurried = [member for member in members if member.role == "worker" and self._marks.has(member.index)]
            await_end(hurried, NO_GRACE, LOOK / 5)
            end_sessions(member.session for member in hurried)
            await_end(members, GRACE, LOOK / 5)
            end_sessions(member.session for member in members if member.session)


def _print(restart: str) -> None:
    say(restart)
    note_beside("restart", restart)


def _has_failed(member: ManagedProcess) -> bool:
    """Return True if the process failed; a worker that has saved and exited has not."""
    return bool(member.exit_code) and not (member.role == "worker" and member.exit_code == REQUEUE)
