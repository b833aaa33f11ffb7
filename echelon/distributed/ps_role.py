"""The role of this process in a job with parameter servers: worker, server, or "alone" if the job has no servers.

Arguments or the environment give the role (``echelon run`` and Paddle's launchers set variables); arguments win.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from echelon.base.endpoints import Trainers, parse_endpoints, read_trainer_id, read_trainers
from echelon.base.environment import (
    PADDLE_ENDPOINT,
    PADDLE_ENDPOINTS,
    PADDLE_PORT,
    PADDLE_RANK,
    PADDLE_SERVERS,
    PADDLE_WORLD,
    POD_IP,
    PS_JOIN_TIMEOUT,
    PS_SESSION,
    PS_TOKEN,
    TRAINING_ROLE,
    whole_number,
)
from echelon.base.errors import UsageError, nearest
from echelon.base.formatting import things

Part = Literal["worker", "server", "alone"]

#: Paddle's names and Echelon's.
WORDS: dict[str, Part] = {"trainer": "worker", "worker": "worker", "pserver": "server", "server": "server"}
#: Seconds that workers and servers wait for one another at the start.
JOIN_TIMEOUT = 300.0
#: The session of a job that was started by hand without a session name.
BY_HAND = "job"


@dataclass(frozen=True)
class Role:
    """The role of one process in the job.

    index:      the trainer's id, or the server's position in ``endpoints``
    endpoints:  ``host:port`` of every server, in the same order everywhere; empty for "alone"
    session:    name of this run of the job; servers start over when a new one arrives
    token:      secret that servers require; '' if they require none
    """

    role: Part = "alone"
    index: int = 0
    endpoints: tuple[str, ...] = ()
    workers: int = 1
    current_endpoint: str = ""
    session: str = BY_HAND
    token: str = field(default="", repr=False)
    join_timeout: float = JOIN_TIMEOUT

    @property
    def is_server(self) -> bool:
        return self.role == "server"

    @property
    def is_worker(self) -> bool:
        """True if this process trains: a process without servers does, too."""
        return self.role != "server"


ALONE = Role()


def find_role(
    env: Mapping[str, str] | None = None,
    *,
    pservers: str | Sequence[str] | None = None,
    trainers: Trainers = None,
    trainer_id: int | str | None = None,
    role: str | None = None,
    current_endpoint: str | None = None,
    session: str | None = None,
    token: str | None = None,
    join_timeout: float | None = None,
) -> Role:
    """Return this process's role, from arguments or else ``env``; "alone" if neither names a server."""
    env = os.environ if env is None else env
    endpoints = _endpoints(env, pservers)
    part = _part(env, role, bool(endpoints))
    if part == "alone":
        return ALONE
    if not endpoints:
        raise UsageError(
            f"{_origin(role, 'role', TRAINING_ROLE)} makes this process a server, but no server endpoints are given; "
            f"give pservers='host:port,...' or set {PADDLE_SERVERS[0]}"
        )
    workers = _workers(env, trainers)
    own = _own_endpoint(env, current_endpoint)
    return Role(
        role=part,
        index=_server_index(own, endpoints) if part == "server" else _trainer_id(env, trainer_id, workers),
        endpoints=endpoints,
        workers=workers,
        current_endpoint=own,
        session=session or env.get(PS_SESSION) or BY_HAND,
        token=env.get(PS_TOKEN, "") if token is None else token,
        join_timeout=_join_timeout(env, join_timeout),
    )


def _endpoints(env: Mapping[str, str], given: str | Sequence[str] | None) -> tuple[str, ...]:
    result = given or next((env[name] for name in PADDLE_SERVERS if env.get(name)), None)
    return parse_endpoints(result) if result else ()


def _part(env: Mapping[str, str], given: str | None, has_servers: bool) -> Part:
    word = given or env.get(TRAINING_ROLE) or "worker"
    if word.lower() not in WORDS:
        known = [name for name in get_args(Part) if name != "alone"] if given else ["TRAINER", "PSERVER"]
        raise UsageError(f"{_origin(given, 'role', TRAINING_ROLE)}: no role '{word}'{nearest(word, known)}")
    part = WORDS[word.lower()]
    return part if has_servers or part == "server" else "alone"


def _workers(env: Mapping[str, str], given: Trainers) -> int:
    """Return the number of workers: as given, or the length of the list of their endpoints."""
    result = read_trainers(given)
    if result is None and not env.get(PADDLE_WORLD) and not env.get("WORLD_SIZE") and env.get(PADDLE_ENDPOINTS):
        result = parse_endpoints(env[PADDLE_ENDPOINTS], "trainer")
    if isinstance(result, tuple):
        return len(result)
    count = whole_number(env, PADDLE_WORLD, whole_number(env, "WORLD_SIZE", 1)) if result is None else result
    if count < 1:
        raise UsageError(f"{_origin(given, 'trainers', PADDLE_WORLD)} is {count}; a job has 1 worker or more")
    return count


def _trainer_id(env: Mapping[str, str], given: int | str | None, workers: int) -> int:
    number = read_trainer_id(given)
    if number is None and (env.get(PADDLE_RANK) or env.get("RANK")):
        number = whole_number(env, PADDLE_RANK if env.get(PADDLE_RANK) else "RANK")
    if number is None and workers > 1:
        raise UsageError(
            f"which of the {workers} workers is this? give each its own trainer_id from 0 to {workers - 1}, "
            f"or set {PADDLE_RANK}"
        )
    if not 0 <= (number or 0) < workers:
        raise UsageError(
            f"{_origin(given, 'trainer_id', PADDLE_RANK)} is {number}, but the job has {things(workers, 'worker')}; "
            f"it must lie in 0..{workers - 1}"
        )
    return number or 0


def _own_endpoint(env: Mapping[str, str], given: str | None) -> str:
    if given or env.get(PADDLE_ENDPOINT):
        return (given or env[PADDLE_ENDPOINT]).strip()
    address, port = env.get(POD_IP, ""), env.get(PADDLE_PORT, "")
    return f"{address}:{port}" if address and port else ""


def _server_index(own: str, endpoints: tuple[str, ...]) -> int:
    if not own:
        raise UsageError(
            f"which of the {len(endpoints)} servers is this? give current_endpoint='host:port', or set "
            f"{PADDLE_ENDPOINT} (or {POD_IP} and {PADDLE_PORT})"
        )
    if own not in endpoints:
        raise UsageError(
            f"this server is {own}, which is not among the servers {', '.join(endpoints)}; "
            "write it as the list does, or add it there on every host"
        )
    return endpoints.index(own)


def _join_timeout(env: Mapping[str, str], given: float | None) -> float:
    text = env.get(PS_JOIN_TIMEOUT, "")
    try:
        seconds = given if given is not None else float(text) if text else JOIN_TIMEOUT
    except ValueError:
        raise UsageError(f"{PS_JOIN_TIMEOUT} must be a number of seconds, but it is '{text}'") from None
    if not seconds > 0:
        raise UsageError(f"the join timeout is {seconds:g} s; it must be above 0")
    return seconds


def _origin(given: object, argument: str, variable: str) -> str:
    """Return the name of the setting that gave a value, for messages."""
    return argument if given is not None else variable
