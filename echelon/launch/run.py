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
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from echelon.errors import PeerLost
from echelon.launch.agent import HostAgent, JobFailed, host_failure
from echelon.launch.failure import Failure
from echelon.launch.guard import Guard
from echelon.launch.job import Job
from echelon.launch.meeting import open_muster, own_address
from echelon.launch.muster import Muster
from echelon.launch.ranks import RankEnvironment, export


def launch(job: Job) -> int:
    """Run the job on this host and with the others; the exit code is the first failing rank's, or 0."""
    logging.disable(logging.CRITICAL)  # torch's agent tells its own story at length; ours is one line
    _heed_signals()
    if job.nnodes == 1 and job.master is not None:
        _say("--master is not needed for a job on one host and is left out")
    try:
        with tempfile.TemporaryDirectory(prefix="echelon-") as records, Guard(records) as guard:
            return _run(job, Path(records), guard)
    except SignalException as stop:
        _say(f"stopped by {stop.sigval.name}; no process is left")
        return 128 + stop.sigval


def _run(job: Job, records: Path, guard: Guard) -> int:
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


def _heed_signals() -> None:
    """As torch's agent does once ranks run, but from the start, and leaving alone what nohup set to be ignored."""
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number in heeded:
        signal.signal(number, _stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in heeded)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))


def _say(line: str) -> None:
    print(f"echelon: {line}", file=sys.stderr, flush=True)
