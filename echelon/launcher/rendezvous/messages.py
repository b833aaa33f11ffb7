"""JSON messages between launchers at the rendezvous: hosts, members of a round, and its outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from echelon.base.errors import PeerLost, UsageError
from echelon.base.json_head import parse_object
from echelon.launcher.failure import Failure

#: Causes of the end of a round: a rank failed, or stalled; a host was lost, joined, or leaves; all ranks have left.
Cause = Literal["failed", "stuck", "lost", "joined", "leaving", "left"]

#: Errors of a message that this program did not write; an infinite number overflows.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


@dataclass(frozen=True)
class RendezvousConfig:
    """The settings of the rendezvous, the same on all hosts."""

    least: int
    most: int
    elastic: bool
    procs: int
    max_restarts: int
    join_timeout: float
    last_call: float
    host_timeout: float
    grace: float

    @property
    def nnodes(self) -> str:
        """The value of --nnodes."""
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


@dataclass(frozen=True)
class RendezvousHost:
    """A launcher's description of itself, which it writes to the store when it joins."""

    token: str
    name: str
    address: str
    #: ``host:port`` of each of its ranks
    endpoints: tuple[str, ...]
    #: its --nnodes
    hosts: str
    node_rank: int | None
    #: True if it serves the store of the rendezvous
    serves: bool
    #: values that its plugins give to those of the other hosts
    extras: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def read(fields: Mapping[str, Any]) -> RendezvousHost:
        return RendezvousHost(
            token=str(fields["token"]),
            name=str(fields["name"]),
            address=str(fields["address"]),
            endpoints=tuple(str(item) for item in fields["endpoints"]),
            hosts=str(fields["hosts"]),
            node_rank=None if fields["node_rank"] is None else int(fields["node_rank"]),
            serves=bool(fields["serves"]),
            extras={str(name): str(value) for name, value in fields["extras"].items()},
        )


@dataclass(frozen=True)
class JoinRequest:
    """A host is ready for this round; ``place``, ``number`` and ``restarts`` are those of its last round."""

    round: int
    host: RendezvousHost
    place: int | None = None
    number: int = -1
    restarts: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> JoinRequest:
        try:
            given = parse_object(text)
            place = None if given["place"] is None else int(given["place"])
            host = RendezvousHost.read(given["host"])
            return JoinRequest(int(given["round"]), host, place, int(given["number"]), int(given["restarts"]))
        except MALFORMED:
            raise foreign_message() from None


@dataclass(frozen=True)
class RoundMembers:
    """The hosts of a round, in order; or the reason why there is none."""

    hosts: tuple[RendezvousHost, ...] = ()
    #: rounds of the whole job before this one, and the number of them that count as restarts
    number: int = 0
    restarts: int = 0
    refusal: str = ""
    #: True if the refusal is due to a mistake of the user
    mistake: bool = False

    def place_of(self, token: str) -> int | None:
        return next((place for place, host in enumerate(self.hosts) if host.token == token), None)

    def changes(self, before: RoundMembers, name: str, failure: Failure | None) -> str:
        """Return a line about hosts lost and joined since the last round, or ''. ``name`` is this host's."""
        old, new = ({host.token: host.name for host in members.hosts} for members in (before, self))
        lost = [name for token, name in old.items() if token not in new]
        come = [name for token, name in new.items() if token not in old]
        if not self.number or not (lost or come):
            return ""
        said = [f"host {name} was lost" for name in lost]
        if failure is not None and failure.rank < 0 and failure.host in lost:
            said[lost.index(failure.host)] = failure.line
        said += [f"host {name} joined" for name in (come if old else [name])]  # for a host that joined, all are new
        hosts, ranks = len(new), sum(len(host.endpoints) for host in self.hosts)
        return f"{', '.join(said)}: going on with {hosts} host{'s'[: hosts > 1]} ({ranks} rank{'s'[: ranks > 1]})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> RoundMembers:
        try:
            given = parse_object(text)
            hosts = tuple(RendezvousHost.read(host) for host in given["hosts"])
            number, restarts = int(given["number"]), int(given["restarts"])
            return RoundMembers(hosts, number, restarts, str(given["refusal"]), bool(given["mistake"]))
        except MALFORMED:
            raise foreign_message() from None


@dataclass(frozen=True)
class RoundOutcome:
    """The outcome of a round: the failure, whether all hosts start again, and whether that counts as a restart."""

    failure: Failure
    again: bool
    cause: Cause = "failed"
    counted: bool = True

    @property
    def soft(self) -> bool:
        """True if nothing failed: ranks that can save and exit get the time for it."""
        return self.cause in ("joined", "leaving", "left")

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"failure": self.failure.to_json()})

    @staticmethod
    def from_json(text: bytes) -> RoundOutcome:
        try:
            given = parse_object(text)
            if given["cause"] not in get_args(Cause):
                raise ValueError(given["cause"])
            failure = Failure.from_json(given["failure"])
            return RoundOutcome(failure, bool(given["again"]), given["cause"], bool(given["counted"]))
        except MALFORMED:
            raise foreign_message() from None


def host_failure(host: str, message: str, exit_code: int) -> Failure:
    return Failure(-1, 0, host, 0, exit_code, time.time(), message=message)


def foreign_message() -> PeerLost:
    return PeerLost("the store of this job has a message from another program; choose another port for --master")


def order_hosts(hosts: Sequence[RendezvousHost]) -> list[RendezvousHost]:
    """Order the hosts: by --node-rank if given; else the serving host first, then by address and arrival."""
    places: dict[int, RendezvousHost] = {}
    for host in hosts:
        if host.node_rank is not None:
            if other := places.get(host.node_rank):
                raise UsageError(
                    f"--node-rank {host.node_rank} was given on two hosts, {other.name} and {host.name}; "
                    "give each host its own, or none"
                )
            places[host.node_rank] = host
    rest = sorted((host for host in hosts if host.node_rank is None), key=lambda c: (not c.serves, c.address))
    free = (place for place in range(len(hosts)) if place not in places)
    places |= dict(zip(free, rest, strict=True))
    return [places[place] for place in range(len(hosts))]


def check_same_nnodes(hosts: Sequence[RendezvousHost]) -> None:
    """Raise ``UsageError`` unless every host was given the same --nnodes."""
    for host in hosts:
        if host.hosts != hosts[0].hosts:
            names = f"{hosts[0].name} says --nnodes {hosts[0].hosts}, {host.name} says --nnodes {host.hosts}"
            raise UsageError(f"the hosts disagree on their number: {names}; give all the same")


def order_elastic_hosts(arrivals: Sequence[JoinRequest]) -> list[RendezvousHost]:
    """Order the hosts of an elastic job: hosts of the last round in their order, then new ones."""
    far = 1 << 30

    def key(arrival: JoinRequest) -> tuple[bool, int, bool, int, str]:
        host = arrival.host
        place, node_rank = (far if number is None else number for number in (arrival.place, host.node_rank))
        return arrival.place is None, place, not host.serves, node_rank, host.address

    return [arrival.host for arrival in sorted(arrivals, key=key)]
