"""``launch``: runs a validated job, reports failures, and leaves no process behind."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.base.console import say
from echelon.base.directory_lock import LockUse, claim, release
from echelon.base.environment import (
    BOUND_MARK,
    COPIES,
    ELASTIC,
    LEAVE_MARK,
    LOG_DIR,
    MEMORY,
    PADDLE_SERVERS,
    PLAN,
    PS_SESSION,
    PS_TOKEN,
    RECORD_DIR,
    REQUEUE,
    RESTARTS,
    SERVER_INDEX,
    STALL,
    STALL_JUDGE,
    TIMELINE,
    TRAINING_ROLE,
    TRIAL,
    WAIT_LINES,
)
from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.job_secret import find_token
from echelon.base.torch_log import ERRORS, log_level
from echelon.launcher.agent import HostAgent, HostPreempted, JobFailed, stopped_host
from echelon.launcher.agent_plugin import AgentPlugin
from echelon.launcher.failure import Failure
from echelon.launcher.graceful_stop import GracefulStopMarkers
from echelon.launcher.job import Job
from echelon.launcher.memory_plugin import MemoryCheckpointPlugin
from echelon.launcher.orphan_reaper import OrphanReaper
from echelon.launcher.ps_job import create_ps_job
from echelon.launcher.rank_environment import RankEnvironment, export, forget_logs
from echelon.launcher.rendezvous.handler import LauncherRendezvous
from echelon.launcher.rendezvous.messages import host_failure
from echelon.launcher.rendezvous.open_rendezvous import open_rendezvous, own_address
from echelon.launcher.rendezvous.participant import SpareHostReleased
from echelon.launcher.role_assignment import open_session, share
from echelon.launcher.signals import install_launcher_signal_handlers
from echelon.launcher.stall_plugin import StallPlugin
from echelon.launcher.startup_wait_plugin import StartupWaitPlugin
from echelon.observability.runlog.events import note_beside
from echelon.observability.runlog.log_files import given_directory
from echelon.parameter_server.protocol.port_check import check_port

LOGS = LockUse(".launcher", "launcher", "writes its logs and records there, too", leased=True)
#: Seconds that a job may take to end while the next one in its log directory begins.
_ENDING = 1.0


def launch(job: Job) -> int:
    """Run the job on this host together with the others; return the first failing rank's exit code, or 0."""
    if job.roles is not None:
        for index in job.roles.servers:
            check_port(job.roles.endpoints[index])
    _hush_torch()
    install_launcher_signal_handlers()
    if job.options.log_dir is None:
        say(f"launcher: logs and records go to {os.path.relpath(job.log_dir)}")
    with _log_directory(job):
        return _launch(job)


@contextlib.contextmanager
def _log_directory(job: Job) -> Iterator[None]:
    """Lock the log directory inside the context; hosts and parts of one job share it, and jobs that its job starts.

    Raises ``UsageError`` if another job writes there and the options do not allow it.
    """
    if not job.one_host or LOG_DIR in os.environ:
        yield
        return
    shares = job.options.share_log_dir
    if (taken := claim(job.log_dir, LOGS, False, say, patience=0.0 if shares else _ENDING)) is not None:
        if not shares:
            raise UsageError(
                f"{taken}; give this job another --log-dir, or --share-log-dir to mix the logs and records of both"
            )
        say(f"{taken}; logs and records of both jobs will be mixed")
    try:
        yield
    finally:
        release(job.log_dir, LOGS)


def _launch(job: Job) -> int:
    _forget_surrounding_job()
    if job.one_host and job.master is not None:
        say("--master is not needed for a job on one host and is left out")
    try:
        with tempfile.TemporaryDirectory(prefix="echelon-") as records, OrphanReaper(records) as reaper:
            return (
                _run_ranks(job, Path(records), reaper) if job.roles is None else _run_roles(job, Path(records), reaper)
            )
    except SignalException as stop:
        return _stopped(stop)


def _hush_torch() -> None:
    """Silence torch's agent and store, which log at length and warn of every lost host; Echelon prints one line."""
    logging.disable(logging.CRITICAL)
    if (level := log_level()) is not None:
        level.value = ERRORS


def _forget_surrounding_job() -> None:
    """Remove the variables of an enclosing job, so that a job started by a script does not take them for its own."""
    if LOG_DIR in os.environ:
        of_servers = (*PADDLE_SERVERS, TRAINING_ROLE, PS_TOKEN, PS_SESSION, BOUND_MARK, RESTARTS, SERVER_INDEX)
        of_ranks = (
            PLAN,
            TRIAL,
            ELASTIC,
            MEMORY,
            COPIES,
            LEAVE_MARK,
            STALL,
            STALL_JUDGE,
            RECORD_DIR,
            TIMELINE,
            WAIT_LINES,
        )
        for name in (*of_servers, *of_ranks):
            os.environ.pop(name, None)


def _run_ranks(job: Job, records: Path, reaper: OrphanReaper) -> int:
    address = own_address(job)
    export(job, address)
    with contextlib.ExitStack() as closing:
        plugins = _plugins(job, address, records)
        for plugin in plugins:
            closing.callback(plugin.close)
        rendezvous = open_rendezvous(job, address, lambda: _announcements(plugins), say)
        ranks = RankEnvironment(job.log_dir, records)
        agent = HostAgent(job, rendezvous, ranks, reaper, socket.gethostname(), GracefulStopMarkers(records), plugins)
        try:
            return _run_agent(agent, rendezvous)
        finally:
            if job.timeline is not None:
                _report_timeline()


def _run_agent(agent: HostAgent, rendezvous: LauncherRendezvous) -> int:
    last_word, goes_on = "", False
    try:
        agent.run()
        agent.note("ended", "all ranks are done")
        return 0
    except JobFailed as end:
        last_word = end.failure.line
        _report(end.failure)
        agent.note("failed", last_word, end.failure)
        return end.failure.status
    except HostPreempted as end:
        last_word, goes_on = f"it was stopped by {end.number.name}", end.goes_on
        agent.note("ended", f"stopped by {end.number.name} after saving")
        return _left(end)
    except SpareHostReleased as end:
        say(str(end))
        return 0
    except SignalException as stop:
        last_word = f"it was stopped by {stop.sigval.name}"
        agent.note("ended", f"stopped by {stop.sigval.name}")
        goes_on = _notify_others(rendezvous, stopped_host(socket.gethostname(), stop.sigval))
        raise
    except EchelonError as error:
        last_word = str(error)
        _notify_others(rendezvous, host_failure(socket.gethostname(), f"gave up: {error}", 1))
        raise
    finally:
        with contextlib.suppress(PeerLost):
            rendezvous.depart(last_word, goes_on)


def _plugins(job: Job, address: str, records: Path) -> list[AgentPlugin]:
    """Return the plugins of this launcher."""
    plugins: list[AgentPlugin] = [
        StartupWaitPlugin(records, say),
        StallPlugin(job.options.stall, ends=job.options.on_stall == "end"),
    ]
    if job.copies:
        plugins.append(MemoryCheckpointPlugin(address, find_token(), job.copies))
    return plugins


def _announcements(plugins: Sequence[AgentPlugin]) -> dict[str, str]:
    return {name: value for plugin in plugins for name, value in plugin.announcement.items()}


def _run_roles(job: Job, records: Path, reaper: OrphanReaper) -> int:
    roles = job.roles
    assert roles is not None
    session = open_session(roles, job.log_dir, os.environ)
    export(job, own_address(job))
    share(roles, session, records, job.options.join_timeout)
    if roles.one_host:
        forget_logs(job.log_dir, "rank", beyond=roles.trainers)
        forget_logs(job.log_dir, "server", beyond=len(roles.endpoints))
    try:
        create_ps_job(job, roles, session, records, reaper).run()
    except JobFailed as end:
        _report(end.failure)
        note_beside("failed", end.failure.line, end.failure.of_rank, **end.failure.details)
        status = end.failure.status
    except HostPreempted as end:
        status = _left(end)
    except SignalException as stop:
        status = _stopped(stop)
    else:
        status = 0
        note_beside("ended", "all workers are done")
    if job.timeline is not None:
        _report_timeline()
    if status and session.holds_state():
        say(f"the servers' state is in {session.state}; to go on from it, add --state {session.state}")
    else:
        session.forget()
    return status


def _report_timeline() -> None:
    """Merge the timeline if the ranks have not: parameter-server workers and failed jobs do not."""
    from echelon.observability.trace.trace_report import conclude

    for line in conclude(given_directory()):
        say(line)


def _report(failure: Failure) -> None:
    say(failure.line)
    if failure.traceback:
        print(failure.traceback.rstrip(), file=sys.stderr)
    if failure.log:
        here = "" if failure.host == socket.gethostname() else f" on {failure.host}"
        say(f"its log is {failure.log}{here}")


def _notify_others(rendezvous: LauncherRendezvous, why: Failure) -> bool:
    """Tell the other hosts that this one leaves; return True if the job continues without it."""
    with contextlib.suppress(PeerLost):
        return bool(rendezvous.hosts) and rendezvous.leave_rendezvous(why).again
    return False


def _left(end: HostPreempted) -> int:
    say(f"stopped by {end.number.name} after saving; exit code {REQUEUE} requests a restart")
    return REQUEUE


def _stopped(stop: SignalException) -> int:
    say(f"stopped by {stop.sigval.name}; no process is left")
    return 128 + int(stop.sigval)
