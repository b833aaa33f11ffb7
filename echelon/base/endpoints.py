"""Parses endpoints as users write them: ``host:port`` of servers and of trainers, in comma-separated lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.base.errors import UsageError

#: The number of trainers, or the endpoints of all of them; None: read it from the environment.
Trainers = int | str | Sequence[str] | None


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host stands in brackets. Port 0 means any free port, for a server."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"'{endpoint}' is no endpoint; write HOST:PORT, for example 127.0.0.1:6174")
    return host, int(port)


def parse_endpoints(given: str | Sequence[str], kind: str = "server") -> tuple[str, ...]:
    """Return the endpoints of a comma-separated text or a sequence; each is a ``host:port``, and none appears twice."""
    parts = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{given!r} is no list of {kind}s; write 'HOST:PORT,HOST:PORT'")
    endpoints = tuple(part.strip() for part in parts)
    for endpoint in endpoints:
        if split_endpoint(endpoint)[1] == 0:
            raise UsageError(f"{endpoint} among the {kind}s has no port that workers could call; give it one above 0")
        if endpoints.count(endpoint) > 1:
            raise UsageError(f"{endpoint} is listed twice among the {kind}s; list each {kind} once")
    return endpoints


def read_trainers(given: Trainers) -> int | tuple[str, ...] | None:
    """Return the number of trainers, or their endpoints, depending on what was given; text of digits is a number."""
    if given is None or given == "":
        return None
    if isinstance(given, int) or (isinstance(given, str) and ":" not in given) or not isinstance(given, Iterable):
        return _whole(given, f"trainers is {given!r}, no number and no endpoints; write 2, or 'HOST:PORT,HOST:PORT'")
    return parse_endpoints(given, "trainer")


def read_trainer_id(given: int | str | None) -> int | None:
    """Return the index of this trainer; text of digits is a number."""
    if given is None or given == "":
        return None
    return _whole(given, f"trainer_id is {given!r}, which is no whole number; number the trainers from 0")


def _whole(given: object, refusal: str) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str) and given.strip().isdecimal():
        return int(given)
    raise UsageError(refusal)
