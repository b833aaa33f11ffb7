"""From a checked job to its exit code: open, run, report, leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.environment import (
    BOUND_MARK,
    LOG_DIR,
    PADDLE_SERVERS,
    PLAN,
    PS_SESSION,
    PS_TOKEN,
    RESTARTS,
    SERVER_INDEX,
    TRAINING_ROLE,
    TRIAL,
)
from echelon.errors import PeerLost
from echelon.launch.agent import HostAgent, JobFailed, host_failure
from echelon.launch.crew import gather
from echelon.launch.failure import Failure
from echelon.launch.guard import Guard
from echelon.launch.job import Job
from echelon.launch.meeting import open_muster, own_address
from echelon.launch.muster import Muster
from echelon.launch.ranks import RankEnvironment, export, forget_logs
from echelon.launch.roles import open_session, share
from echelon.launch.signals import heed_signals


def launch(job: Job) -> int:
    """Run the job on this host and with the others; the exit code is the first failing rank's, or 0."""
    logging.disable(logging.CRITICAL)  # torch's agent tells its own story at length; ours is one line
    heed_signals()
    _forget_surrounding_job()
    if job.one_host and job.master is not None:
        _say("--master is not needed for a job on one host and is left out")
    try:
        with tempfile.TemporaryDirectory(prefix="echelon-") as records, Guard(records) as guard:
            return _run_ranks(job, Path(records), guard) if job.roles is None else _run_roles(job, Path(records), guard)
    except SignalException as stop:
        return _stopped(stop)


def _forget_surrounding_job() -> None:
    """A script that is itself part of a job may start another one, which must not take itself for that part."""
    if LOG_DIR in os.environ:
        of_servers = (*PADDLE_SERVERS, TRAINING_ROLE, PS_TOKEN, PS_SESSION, BOUND_MARK, RESTARTS, SERVER_INDEX)
        for name in (*of_servers, PLAN, TRIAL):
            os.environ.pop(name, None)


def _run_ranks(job: Job, records: Path, guard: Guard) -> int:
    address = own_address(job)
    export(job, address)
    muster = open_muster(job, address)
    agent = HostAgent(job, muster, RankEnvironment(job.log_dir, records), guard, socket.gethostname())
    try:
        agent.run()
    except JobFailed as end:
        _report(end.failure)
        return end.failure.status
    except SignalException as stop:
        _tell_others(muster, stop.sigval)
        raise
    finally:
        with contextlib.suppress(PeerLost):
            muster.depart()
    return 0


def _run_roles(job: Job, records: Path, guard: Guard) -> int:
    roles = job.roles
    assert roles is not None
    session = open_session(roles, job.log_dir, os.environ)
    export(job, own_address(job))
    share(roles, session, records, job.join_timeout)
    if roles.one_host:
        forget_logs(job.log_dir, "rank", beyond=roles.trainers)
        forget_logs(job.log_dir, "server", beyond=len(roles.endpoints))
    try:
        gather(job, roles, session, records, guard).run()
    except JobFailed as end:
        _report(end.failure)
        status = end.failure.status
    except SignalException as stop:
        status = _stopped(stop)
    else:
        status = 0
    if status and session.holds_state():
        _say(f"the servers' state is in {session.state}; to go on from it, add --state {session.state}")
    else:
        session.forget()
    return status


def _report(failure: Failure) -> None:
    _say(failure.line)
    if failure.traceback:
        print(failure.traceback.rstrip(), file=sys.stderr)
    if failure.log:
        here = "" if failure.host == socket.gethostname() else f" on {failure.host}"
        _say(f"its log is {failure.log}{here}")


def _tell_others(muster: Muster, number: signal.Signals) -> None:
    if muster.round >= 0:
        with contextlib.suppress(PeerLost):
            muster.settle(host_failure(socket.gethostname(), f"was stopped by {number.name}", -number))


def _stopped(stop: SignalException) -> int:
    _say(f"stopped by {stop.sigval.name}; no process is left")
    return 128 + int(stop.sigval)


def _say(line: str) -> None:
    print(f"echelon: {line}", file=sys.stderr, flush=True)
