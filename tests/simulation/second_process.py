"""A second process of a server on a shared file system, while the first one counts as lost and runs on."""

from __future__ import annotations

import errno
import fcntl
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server_life import ServerLife

_real_flock = fcntl.flock
_life: list[ServerLife] = []


def connect_locks(life: ServerLife | None) -> None:
    _life[:] = [life] if life is not None else []


def simulated_flock(handle: Any, how: int) -> None:
    """Lock as the system does, or, in a life without locks, fail as some network file systems do."""
    if _life and not _life[-1].has_locks:
        raise OSError(errno.ENOLCK, "No locks available")
    _real_flock(handle, how)


def start_second(life: ServerLife) -> None:
    """Start a server on another host; the first process is stopped for a while, or unreachable for new connections."""
    job, rng = life.job, life.rng
    index = rng.randrange(life.shape.servers)
    first = job.servers[index]
    if first is None or job.shard(index) is None or job.counted_as_lost():
        return  # it has not taken the directory yet
    # without locks, a process that stops between its last look and its rename for that long is not fenced
    first.stopped = life.has_locks and rng.random() < 0.5
    job.hosts[index] = f"server-{index}-{rng.choice('ab')}"
    job.start_server(index)
    life.rest(rng.choice((0.5, 2.0, 10.0)))
    first.stopped = False
    life.rest(rng.choice((0.5, 2.0, 10.0)))
    if rng.random() < 0.5:
        job.kill(first)
