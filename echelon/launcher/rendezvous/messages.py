"""What launchers tell one another at the muster, as JSON: who they are, who takes part in a round, how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from echelon.base.errors import PeerLost, UsageError
from echelon.launcher.failure import Failure

#: Why a round ends: a rank failed, or seems stuck; a host was lost, came, or takes leave; all ranks have left.
Cause = Literal["failed", "stuck", "lost", "joined", "leaving", "left"]


@dataclass(frozen=True)
class RendezvousConfig:
    """What was agreed for the job before anybody came."""

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
        """As typed."""
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


@dataclass(frozen=True)
class RendezvousHost:
    """A launcher's card, laid on the table when it comes to the muster."""

    token: str
    name: str
    address: str
    #: ``host:port`` for each of its ranks
    endpoints: tuple[str, ...]
    #: its --nnodes
    hosts: str
    node_rank: int | None
    #: whether it serves the store of the muster
    serves: bool
    #: what its companions tell those of the other hosts
    extras: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def read(card: Mapping[str, Any]) -> RendezvousHost:
        return RendezvousHost(
            token=str(card["token"]),
            name=str(card["name"]),
            address=str(card["address"]),
            endpoints=tuple(str(item) for item in card["endpoints"]),
            hosts=str(card["hosts"]),
            node_rank=None if card["node_rank"] is None else int(card["node_rank"]),
            serves=bool(card["serves"]),
            extras={str(name): str(value) for name, value in card["extras"].items()},
        )


@dataclass(frozen=True)
class JoinRequest:
    """A host is ready for this round; ``place``, ``number`` and ``restarts`` are what it knows of the last one."""

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
            given = json.loads(text)
            place = None if given["place"] is None else int(given["place"])
            host = RendezvousHost.read(given["host"])
            return JoinRequest(int(given["round"]), host, place, int(given["number"]), int(given["restarts"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise stranger() from None


@dataclass(frozen=True)
class RoundMembers:
    """Who takes part in a round, in order; or why there is none."""

    hosts: tuple[RendezvousHost, ...] = ()
    #: rounds of the whole job before this one, and how many of them count as restarts
    number: int = 0
    restarts: int = 0
    refusal: str = ""
    #: the refusal is a user's mistake
    mistake: bool = False

    def place_of(self, token: str) -> int | None:
        return next((place for place, host in enumerate(self.hosts) if host.token == token), None)

    def news(self, before: RoundMembers, name: str, failure: Failure | None) -> str:
        """In one line who has gone and who has come since the round before; '' when nobody. ``name`` is ourselves."""
        old, new = ({host.token: host.name for host in lineup.hosts} for lineup in (before, self))
        gone = [name for token, name in old.items() if token not in new]
        come = [name for token, name in new.items() if token not in old]
        if not self.number or not (gone or come):
            return ""
        said = [f"host {name} was lost" for name in gone]
        if failure is not None and failure.rank < 0 and failure.host in gone:
            said[gone.index(failure.host)] = failure.line
        said += [f"host {name} joined" for name in (come if old else [name])]  # to us who came, all are new
        hosts, ranks = len(new), sum(len(host.endpoints) for host in self.hosts)
        return f"{', '.join(said)}: going on with {hosts} host{'s'[: hosts > 1]} ({ranks} rank{'s'[: ranks > 1]})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> RoundMembers:
        try:
            given = json.loads(text)
            hosts = tuple(RendezvousHost.read(card) for card in given["hosts"])
            number, restarts = int(given["number"]), int(given["restarts"])
            return RoundMembers(hosts, number, restarts, str(given["refusal"]), bool(given["mistake"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise stranger() from None


@dataclass(frozen=True)
class RoundOutcome:
    """How a round ended: whom to blame, whether all go again, and whether that counts as a restart."""

    failure: Failure
    again: bool
    cause: Cause = "failed"
    counted: bool = True

    @property
    def soft(self) -> bool:
        """Nothing is broken: ranks that can save and leave are given the time."""
        return self.cause in ("joined", "leaving", "left")

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"failure": self.failure.to_json()})

    @staticmethod
    def from_json(text: bytes) -> RoundOutcome:
        try:
            given = json.loads(text)
            if given["cause"] not in get_args(Cause):
                raise ValueError(given["cause"])
            failure = Failure.from_json(given["failure"])
            return RoundOutcome(failure, bool(given["again"]), given["cause"], bool(given["counted"]))
        except (ValueError, KeyError, TypeError):
            raise stranger() from None


def host_failure(host: str, message: str, exit_code: int) -> Failure:
    return Failure(-1, 0, host, 0, exit_code, time.time(), message=message)


def stranger() -> PeerLost:
    return PeerLost("something that is not a launcher of this job writes to its store")


def order_hosts(cards: Sequence[RendezvousHost]) -> list[RendezvousHost]:
    """The hosts in order: --node-rank where given; else the serving host first, then by address and arrival."""
    places: dict[int, RendezvousHost] = {}
    for card in cards:
        if card.node_rank is not None:
            if other := places.get(card.node_rank):
                raise UsageError(
                    f"--node-rank {card.node_rank} was given on two hosts, {other.name} and {card.name}; "
                    "give each host its own, or none"
                )
            places[card.node_rank] = card
    rest = sorted((card for card in cards if card.node_rank is None), key=lambda c: (not c.serves, c.address))
    free = (place for place in range(len(cards)) if place not in places)
    places |= dict(zip(free, rest, strict=True))
    return [places[place] for place in range(len(cards))]


def check_same_nnodes(cards: Sequence[RendezvousHost]) -> None:
    """Every host must have been given the same --nnodes."""
    for card in cards:
        if card.hosts != cards[0].hosts:
            names = f"{cards[0].name} says --nnodes {cards[0].hosts}, {card.name} says --nnodes {card.hosts}"
            raise UsageError(f"the hosts disagree on their number: {names}; give all the same")


def order_elastic_hosts(arrivals: Sequence[JoinRequest]) -> list[RendezvousHost]:
    """The hosts of an elastic job in order: those of the last round as they stood, behind them who joined."""
    far = 1 << 30

    def key(arrival: JoinRequest) -> tuple[bool, int, bool, int, str]:
        host = arrival.host
        place, node_rank = (far if number is None else number for number in (arrival.place, host.node_rank))
        return arrival.place is None, place, not host.serves, node_rank, host.address

    return [arrival.host for arrival in sorted(arrivals, key=key)]
