"""A read-only server of a checkpoint: it answers pulls, refuses updates, and runs until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from echelon.base.console import say
from echelon.base.security import Security
from echelon.distributed.ps_role import Role
from echelon.parameter_server.persistence.checkpoint import ServerCheckpoint, load_into, locate
from echelon.parameter_server.protocol.job_spec import JobSpec
from echelon.parameter_server.server.server_port import ServerPort
from echelon.parameter_server.server.shard import ServerShard

#: Seconds after which a thread that computes in Python lets another one run; Python's default is 0.005.
_TURN = 0.0005


def serve_checkpoint(role: Role, checkpoint: Path, security: Security) -> int:
    """Run server ``role.index`` of those that share the checkpoint; return the exit code, 128 + n for signal n."""
    path = locate(checkpoint)
    with ServerCheckpoint(path) as saved:
        job = _shared_by(saved.jobs[0], len(role.endpoints))
    shard = ServerShard(role.index, job.servers, read_only=True)
    shard.install(job)
    step = load_into(shard, path)
    _prefer_short_waits()
    security = security.for_loopback(role.endpoints, serves=True)
    server = ServerPort(role.endpoints[role.index], shard.handle, security)
    say(f"server {role.index} of {job.servers} serves step {step} at {server.endpoint}", stdout=True)
    number = _signal()
    server.close()
    return 128 + number


def _prefer_short_waits() -> None:
    """Shorten what a request may wait for in this process: the collection of old objects, and another thread's turn.

    torch and numba leave 250,000 objects, and a full collection looks at all of them: 125 ms in which no thread runs.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_TURN)


def _shared_by(job: JobSpec, servers: int) -> JobSpec:
    """Return the checkpoint's job for another number of servers: rows move by bucket, dense blocks to server 0."""
    if job.servers == servers:
        return job
    return replace(job, servers=servers, blocks=tuple(replace(block, server=0) for block in job.blocks))


def _signal() -> int:
    """Wait for SIGTERM or SIGINT and return the signal's number."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    while not received:
        time.sleep(0.1)
    return received[0]
