"""Parses the options about hosts: their number, the index of this host, and the rendezvous endpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from echelon.base import network
from echelon.base.environment import LOG_DIR, PADDLE_HOSTS, TOKEN, TOKEN_FILE
from echelon.base.errors import UsageError
from echelon.base.job_secret import find_token
from echelon.base.option_checks import at_least


def host_counts(requested: int | str | None) -> tuple[int, int, str | None]:
    """Return the minimum and maximum number of hosts, and the text of a range such as ``2:8``, else None."""
    text = str(_node_count(os.environ) if requested is None else requested)
    if not re.fullmatch(r"-?\d+|\d+:\d+", text):
        raise UsageError(f"--nnodes '{text}' is neither a number of hosts (4) nor a range (2:8)")
    fewest, colon, most = text.partition(":")
    at_least(1, "--nnodes", int(fewest))
    if colon and int(most) < int(fewest):
        raise UsageError(f"--nnodes {text} begins above its end; write the smaller number first")
    return int(fewest), int(most or fewest), text if colon else None


def _node_count(env: Mapping[str, str]) -> int:
    if LOG_DIR in env:  # inside a rank these variables describe the enclosing job
        return 1
    for name in PADDLE_HOSTS:
        if text := env.get(name, ""):
            if not text.isdigit():
                raise UsageError(
                    f"{name}='{text}': expected the number of hosts; correct this environment variable, or unset it"
                )
            return int(text)
    return 1


def check_node_rank(node_rank: int | None, hosts: int) -> None:
    if node_rank is not None and not 0 <= node_rank < hosts:
        raise UsageError(f"--node-rank {node_rank} does not fit --nnodes {hosts}; it must lie in 0..{hosts - 1}")


def master_endpoints(master: str | None, hosts: int) -> tuple[tuple[str, int], ...]:
    if master is None:
        if hosts > 1:
            raise UsageError(
                f"a job on {hosts} hosts needs a rendezvous address; give every host the same --master HOST:PORT, "
                "where HOST is one of them"
            )
        return ()
    points = tuple(_master_endpoint(place.strip()) for place in master.split(","))
    if len(set(points)) < len(points):
        raise UsageError(f"--master {master} names an address twice; name each once")
    if hosts > 1 and find_token() is None and not all(_is_loopback(address) for address, _ in points):
        raise UsageError(
            f"a job on several hosts needs a shared secret; export {TOKEN}=... (any long random text, the same "
            f"on every host), or {TOKEN_FILE}"
        )
    return points


def _master_endpoint(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--master '{master}' is not HOST:PORT, such as 10.0.0.1:29500")
    return network.resolve(host.strip("[]")), int(port)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
