"""Lines about a session with parameter servers, for the start and the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.base.endpoints import split_endpoint
from echelon.base.formatting import things
from echelon.base.security import is_loopback
from echelon.strategy import ParameterServer


def mode_lines(settings: ParameterServer, endpoints: Sequence[str], workers: int, dense: bool) -> Iterator[str]:
    """Yield what the mode and the wire's dtype mean for this job.

    endpoints: servers of the job; none if the tables are in this process
    dense:     True if servers hold the dense parameters
    """
    narrow = settings.wire == "bfloat16"
    if narrow and all(is_loopback(split_endpoint(endpoint)[0]) for endpoint in endpoints):
        effect = "only costs time on one host" if endpoints else "has no effect without servers"
        yield f"parameter server: wire='bfloat16' {effect}; it saves bytes between hosts"
    if endpoints:
        how = "on the servers" if dense else "summed between workers"
        exact = "" if settings.mode == "sync" and not narrow else " (inexact)"
        yield f"parameter server: {settings.mode}{exact}, {things(workers, 'worker')}, dense parameters {how}"


def staleness_line(servers: Sequence[Mapping[str, Any]]) -> str:
    """Return the line about staleness for the end of a run.

    servers: counters of each server
    """
    counts = [server["staleness"] for server in servers]
    pushes = sum(count["pushes"] for count in counts)
    mean = sum(count["mean"] * count["pushes"] for count in counts) / max(1, pushes)
    most = max(count["max"] for count in counts)
    return f"staleness: others made {mean:.1f} updates between a read and its push on average, {most} at most"
