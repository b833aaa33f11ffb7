"""Trainers of a collective job that are listed by their endpoints and started without a launcher.

This is Fluid's NCCL2 mode: each trainer knows its index, the ``host:port`` of all and its own, from arguments or from
the PADDLE_* environment. The trainers join one torch.distributed job; rank 0 listens at the first endpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from echelon.base.endpoints import Trainers, parse_endpoints, read_trainer_id, read_trainers, split_endpoint
from echelon.base.environment import (
    ALONE,
    LOG_DIR,
    LOOPBACK,
    PADDLE_ENDPOINT,
    PADDLE_ENDPOINTS,
    PADDLE_HOSTS,
    PADDLE_RANK,
    PADDLE_SERVERS,
    PADDLE_WORLD,
    PLAN_ONLY,
    VERIFY,
    RankInfo,
    whole_number,
)
from echelon.base.errors import UsageError


def trainer_rank_info(
    env: Mapping[str, str],
    *,
    trainers: Trainers = None,
    trainer_id: int | str | None = None,
    current_endpoint: str | None = None,
) -> RankInfo:
    """Return this trainer's coordinates among the listed endpoints; ``ALONE`` for a single trainer or none.

    An argument wins over the environment. In a process that a launcher started, variables describe the launcher's job
    and are not read.
    """
    if PLAN_ONLY in env or VERIFY in env:
        return ALONE  # one process simulates the job
    if LOG_DIR in env:
        env = {}
    given = read_trainers(trainers)
    endpoints = given if isinstance(given, tuple) else _listed(env)
    announced = given if isinstance(given, int) else None if given else _announced(env)
    number = _number(env, trainer_id)
    if not endpoints:
        _refuse_unreachable(announced, "trainers" if given is not None else PADDLE_WORLD, number)
        return _alone(env, current_endpoint)
    if announced is not None and announced != len(endpoints):
        raise UsageError(
            f"{'trainers' if given is not None else PADDLE_WORLD} is {announced}, but {PADDLE_ENDPOINTS} lists "
            f"{len(endpoints)} ({','.join(endpoints)}); make them agree"
        )
    own = (current_endpoint or env.get(PADDLE_ENDPOINT, "")).strip()
    return _place(_index(number, own, endpoints), endpoints)


def with_master_endpoint(place: RankInfo, env: Mapping[str, str], trainers: Trainers) -> RankInfo:
    """Return the coordinates of a parameter-server worker, with the first trainer's endpoint as the master.

    Workers connect to one another only in hybrid mode (``bind``). A launcher's MASTER_ADDR wins over the endpoints.
    """
    given = read_trainers(trainers)
    endpoints = given if isinstance(given, tuple) else () if LOG_DIR in env else _listed(env)
    if place.master_addr or not place.rank < len(endpoints) == place.world_size > 1:
        return place
    return replace(_place(place.rank, endpoints), launcher=place.launcher)


def say_launcher_wins(place: RankInfo, trainers: Trainers) -> None:
    """Print on rank 0 that ``trainers`` differs from the number of processes that the launcher has started."""
    given = read_trainers(trainers)
    count = len(given) if isinstance(given, tuple) else given
    if count is not None and count != place.world_size and place.rank == 0:
        print(
            f"echelon: join: trainers announces {count} processes, but {place.launcher} has started "
            f"{place.world_size}; the launcher's number is used",
            file=sys.stderr,
        )


def _listed(env: Mapping[str, str]) -> tuple[str, ...]:
    return parse_endpoints(env[PADDLE_ENDPOINTS], "trainer") if env.get(PADDLE_ENDPOINTS) else ()


def _announced(env: Mapping[str, str]) -> int | None:
    return whole_number(env, PADDLE_WORLD) if env.get(PADDLE_WORLD) else None


def _number(env: Mapping[str, str], given: int | str | None) -> tuple[str, int] | None:
    """Return this trainer's index and the name of the setting that gave it; None if it was not given."""
    result = read_trainer_id(given)
    if result is not None:
        return "trainer_id", result
    return (PADDLE_RANK, whole_number(env, PADDLE_RANK)) if env.get(PADDLE_RANK) else None


def _refuse_unreachable(announced: int | None, origin: str, number: tuple[str, int] | None) -> None:
    """Raise if several trainers were announced but nothing says how they find each other."""
    remedy = (
        f"set {PADDLE_SERVERS[0]} (pservers=) for parameter servers, {PADDLE_ENDPOINTS} (trainers='HOST:PORT,...') for "
        "collective training, or start with 'echelon run'"
    )
    if announced is not None and announced > 1:
        raise UsageError(f"{origin} announces {announced} trainers, but neither servers nor endpoints; {remedy}")
    if announced is not None and announced < 1:
        raise UsageError(f"{origin} is {announced}; a job has 1 trainer or more")
    if number is not None and number[1] != 0:
        name, value = number
        raise UsageError(f"{name} is {value}, but no other trainers were announced; {remedy}")


def _alone(env: Mapping[str, str], current_endpoint: str | None) -> RankInfo:
    if current_endpoint:
        raise UsageError(
            f"current_endpoint is {current_endpoint}, but no list of trainers or servers was given; "
            "give trainers='HOST:PORT,HOST:PORT' too, or leave it out"
        )
    hosts = PADDLE_HOSTS[0]
    if env.get(hosts, "1") not in ("0", "1"):
        print(
            f"echelon: join: {hosts} is {env[hosts]}, but this process was started without 'echelon run', "
            "which reads it as the number of hosts; it trains alone",
            file=sys.stderr,
        )
    return ALONE


def _index(number: tuple[str, int] | None, own: str, endpoints: Sequence[str]) -> int:
    """Return this trainer's index, which must be the position of its endpoint in the list."""
    count, listed = len(endpoints), ",".join(endpoints)
    if own and own not in endpoints:
        raise UsageError(
            f"current_endpoint (or {PADDLE_ENDPOINT}) is {own}, which is not among the trainers {listed}; "
            "write it as the list does"
        )
    if number is None:
        if own:
            return endpoints.index(own)
        raise UsageError(
            f"which of the {count} trainers is this? give each its own trainer_id from 0 to {count - 1}, "
            f"or set {PADDLE_RANK}"
        )
    name, index = number
    if not 0 <= index < count:
        raise UsageError(
            f"{name} is {index}, but {count} trainers are listed ({listed}); it must lie in 0..{count - 1}"
        )
    if own and endpoints[index] != own:
        raise UsageError(
            f"{name} is {index}, but the endpoint {own} is trainer {endpoints.index(own)} of {listed}; make them agree"
        )
    return index


def _place(rank: int, endpoints: tuple[str, ...]) -> RankInfo:
    """Return the coordinates of one trainer; local ranks count the trainers of the same host in list order."""
    if len(endpoints) == 1:
        return ALONE
    hosts = [_host(endpoint) for endpoint in endpoints]
    host, here = hosts[rank], hosts.count(hosts[rank])
    return RankInfo(
        rank=rank,
        world_size=len(endpoints),
        local_rank=hosts[:rank].count(host),
        local_world_size=here,
        node_rank=list(dict.fromkeys(hosts)).index(host),
        master_addr=LOOPBACK if here == len(endpoints) else hosts[0],
        master_port=split_endpoint(endpoints[0])[1],
        launcher="trainers' endpoints",
        endpoints=endpoints,
    )


def _host(endpoint: str) -> str:
    """Return the host of an endpoint; all names of the loopback count as one host."""
    host = split_endpoint(endpoint)[0].strip("[]").lower()
    return LOOPBACK if host in ("localhost", "::1") or host.startswith("127.") else host
