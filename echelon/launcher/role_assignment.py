"""Roles of a job with parameter servers: the servers and workers of this host, and their environment variables."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.base import network
from echelon.base.endpoints import parse_endpoints, split_endpoint
from echelon.base.environment import (
    BOUND_MARK,
    LOOPBACK,
    PADDLE_ENDPOINT,
    PADDLE_ENDPOINTS,
    PADDLE_RANK,
    PADDLE_SERVERS,
    PADDLE_WORLD,
    PS_JOIN_TIMEOUT,
    PS_SESSION,
    PS_STATE,
    PS_TOKEN,
    RESTART_COUNT,
    SERVER_INDEX,
    TRAINING_ROLE,
)
from echelon.base.errors import UsageError
from echelon.base.option_checks import at_least
from echelon.distributed.ps_role import BY_HAND
from echelon.launcher.run_options import RunOptions

#: Default of --max-restarts for each server and each worker.
MAX_RESTARTS = 3


@dataclass(frozen=True)
class ParameterServerRoles:
    """Validated options.

    endpoints:      endpoints of all servers of the job, in order
    servers:        indices of the servers that start here
    workers:        number of workers that start here; ``trainers`` counts those of all hosts
    first_trainer:  id of the first worker here; the others follow
    state:          directory of the servers' state; None: a temporary one, which is removed with the job
    """

    endpoints: tuple[str, ...]
    servers: tuple[int, ...]
    workers: int
    trainers: int
    first_trainer: int
    state: Path | None

    @property
    def one_host(self) -> bool:
        return len(self.servers) == len(self.endpoints) and self.workers == self.trainers


def check_roles(options: RunOptions) -> ParameterServerRoles | None:
    """Return the roles that the options describe; None for a job without servers. Raises ``UsageError``."""
    servers, pservers = options.servers, options.pservers
    if servers is None and pservers is None:
        of_servers = ("workers", "trainers", "trainer_id_from", "state")
        if odd := next((name for name in of_servers if getattr(options, name) is not None), None):
            raise UsageError(
                f"--{odd.replace('_', '-')} belongs to a job with parameter servers; add --servers N, or use --procs"
            )
        return None
    here, state = 1 if options.workers is None else options.workers, options.state
    total, first = _count_workers(here, options.trainers, options.trainer_id_from, pservers is not None)
    endpoints, own = _own_endpoints(servers or 0) if pservers is None else _listed_endpoints(pservers, servers)
    if not own and not here:
        raise UsageError("no server of --pservers is on this host and --workers is 0; there is nothing to start here")
    return ParameterServerRoles(endpoints, own, here, total, first, None if state is None else Path(state).absolute())


def _count_workers(here: int, trainers: int | None, first: int | None, listed: bool) -> tuple[int, int]:
    """Return the number of all workers, and the id of the first one here."""
    at_least(0 if listed else 1, "--workers", here)
    if not listed:
        if trainers not in (None, here) or first not in (None, 0):
            raise UsageError("--trainers and --trainer-id-from are for several hosts; name their servers by --pservers")
        return here, 0
    if trainers is None:
        raise UsageError("--pservers is for several hosts; give --trainers, the number of workers on all of them")
    if first is None and 0 < here < trainers:
        raise UsageError(f"{here} of {trainers} workers start here; give --trainer-id-from, the id of the first one")
    if trainers < 1 or (first or 0) < 0 or (first or 0) + here > trainers:
        raise UsageError(
            f"--workers {here} and --trainer-id-from {first or 0} do not fit --trainers {trainers}; "
            "ids go from 0 to the number of trainers less one"
        )
    return trainers, first or 0


def _own_endpoints(count: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if count < 1:
        raise UsageError(f"--servers {count}: expected 1 or more; for a job without servers leave --servers out")
    ports = network.free_ports(LOOPBACK, count)
    return tuple(network.endpoint(LOOPBACK, port) for port in ports), tuple(range(count))


def _listed_endpoints(pservers: str, wanted: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the list, and the indices of this host's servers: those with a local address, none with --servers 0."""
    endpoints = parse_endpoints(pservers)
    if wanted == 0:
        return endpoints, ()
    addresses = [network.resolve(split_endpoint(one)[0].strip("[]"), "--pservers") for one in endpoints]
    local = tuple(index for index, address in enumerate(addresses) if network.is_local(address))
    if wanted is not None and wanted != len(local):
        raise UsageError(
            f"--servers {wanted}, but {len(local)} of the --pservers are on this host; "
            "leave --servers out to start those, or say --servers 0 to start none"
        )
    return endpoints, local


@dataclass(frozen=True)
class JobSession:
    """One run of the job: its name, and the directory of its servers' state."""

    name: str
    state: Path
    #: True if the directory is temporary and is removed when the job has succeeded
    passing: bool

    def holds_state(self) -> bool:
        return any(path.is_file() for path in self.state.glob("*/server-*/**/*"))

    def forget(self) -> None:
        if self.passing:
            shutil.rmtree(self.state, ignore_errors=True)


def open_session(roles: ParameterServerRoles, log_dir: Path, env: Mapping[str, str]) -> JobSession:
    """Open a new session, or the one whose state is in --state: then the servers continue from it."""
    name = env.get(PS_SESSION) or _session_of(roles.state) or (secrets.token_hex(4) if roles.one_host else BY_HAND)
    own = log_dir / f"servers-{name if roles.one_host else secrets.token_hex(4)}"
    session = JobSession(name, roles.state or own, passing=roles.state is None)
    if roles.servers:
        try:
            session.state.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, because it contains the model
            (session.state / "session").write_text(name)
        except OSError as error:
            raise UsageError(f"--state '{session.state}' cannot be used: {error.strerror}") from None
    return session


def _session_of(state: Path | None) -> str:
    if state is None or not (state / "session").is_file():
        return ""
    return (state / "session").read_text().strip()


def share(roles: ParameterServerRoles, session: JobSession, records: Path, join_timeout: float) -> None:
    """Set variables that are the same for servers and workers in the launcher's environment, which they inherit.

    The token is passed only this way: every user of the host can read command lines.
    """
    os.environ |= {
        PADDLE_SERVERS[0]: ",".join(roles.endpoints),
        PADDLE_WORLD: str(roles.trainers),
        PS_SESSION: session.name,
        PS_JOIN_TIMEOUT: f"{join_timeout:g}",
        BOUND_MARK: str(records / "bound"),
    }
    if roles.one_host:
        os.environ.setdefault(PS_TOKEN, secrets.token_hex(16))


def server_environment(roles: ParameterServerRoles, index: int, session: JobSession) -> dict[str, str]:
    return {
        TRAINING_ROLE: "PSERVER",
        SERVER_INDEX: str(index),
        PADDLE_ENDPOINT: roles.endpoints[index],
        PS_STATE: str(session.state),
    }


def worker_environments(roles: ParameterServerRoles) -> list[dict[str, str]]:
    """Return the variables of each worker here; the endpoint for torch.distributed is added when they start."""
    ports = network.free_ports(LOOPBACK, roles.workers) if roles.one_host else []
    endpoints = [network.endpoint(LOOPBACK, port) for port in ports]
    known = {PADDLE_ENDPOINTS: ",".join(endpoints)} if endpoints else {}
    return [
        {
            **known,
            **({PADDLE_ENDPOINT: endpoints[local]} if endpoints else {}),
            TRAINING_ROLE: "TRAINER",
            PADDLE_RANK: str(roles.first_trainer + local),
            "RANK": str(roles.first_trainer + local),
            "WORLD_SIZE": str(roles.trainers),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(roles.workers),
            "GROUP_RANK": "0",
            RESTART_COUNT: "0",
        }
        for local in range(roles.workers)
    ]
