"""A launcher's presence at the muster: coming to its store, arriving for a round, staying in reserve, leaving."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from echelon.base import network
from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.wait_notice import WaitNotice, say_wait
from echelon.launcher.rendezvous.coordinator import SUSPECT, RoundCoordinator, as_refusal
from echelon.launcher.rendezvous.messages import (
    JoinRequest,
    RendezvousConfig,
    RendezvousHost,
    RoundMembers,
    RoundOutcome,
)
from echelon.launcher.rendezvous.store_client import POLL, StoreClient, StoreGone

#: How long the host that serves the store waits for the others to take leave of it.
FAREWELL = 10.0


class SpareHostReleased(Exception):
    """The job has ended well while this host waited in reserve."""


@dataclass(frozen=True)
class RendezvousStore:
    """An open store, where it is, and whether we serve it. ``stand_ins``: how many places are left to go to."""

    store: Store
    where: str
    serves: bool
    stand_ins: int = 0


class RendezvousParticipant:
    """``meet`` opens the store, the next place of --master each time it is called; ``extras`` go onto our card."""

    def __init__(
        self,
        meet: Callable[[], RendezvousStore],
        terms: RendezvousConfig,
        *,
        name: str,
        address: str,
        node_rank: int | None,
        extras: Callable[[], Mapping[str, str]],
        say: Callable[[str], None],
    ) -> None:
        self._meet, self._terms, self._extras, self._say = meet, terms, extras, say
        self._card = RendezvousHost("", name, address, (), terms.nnodes, node_rank, False)
        self._past: tuple[int | None, int, int] = (None, -1, 0)  # our place, and what the line-up knew of itself
        self._told_of_reserve = False
        self._moving = False
        self.lineup = RoundMembers()
        self.line: StoreClient
        self._open()

    @property
    def token(self) -> str:
        return self._card.token

    @property
    def restarts(self) -> int:
        """Of the whole job, as far as we know."""
        return self._past[2]

    def come(self) -> RoundMembers:
        """Wait until the next round is complete, and has a place for us."""
        if self._moving:
            self._open()
        elif self._given_up():
            self._enter()
        self.lineup = self._call_roll() if self.roll else self._await_roll()
        self._past = self.lineup.place_of(self.token), self.lineup.number, self.lineup.restarts
        return self.lineup

    def move(self) -> None:
        """Go to the next place when we come again."""
        self._moving = True

    def accept(self, verdict: RoundOutcome) -> None:
        """The round is over by this verdict, and we go again; elsewhere, when its store is about to go."""
        place, number, restarts = self._past
        self._past = place, number, restarts + verdict.counted
        if verdict.cause == "leaving" and any(self._has_gone(host) for host in self.lineup.hosts if host.serves):
            self._moving = True

    def depart(self, line: str = "", goes_on: bool = False) -> None:
        """Take leave. Who serves the store stays until the others have; they go elsewhere when the job goes on."""
        self.line.set(f"gone/{self.token}", "1")
        if self.roll is None:
            return
        if not self.line.check(self.key("lineup")):
            self.line.set(
                self.key("lineup"), RoundMembers(refusal=line or "the launcher that called us left").to_json()
            )
        self.line.set("moved" if goes_on else "over", line)
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline and any(
            self.roll.pulse.silence(token) < SUSPECT for token in self.roll.known()
        ):
            time.sleep(POLL)

    def key(self, name: str) -> str:
        return f"round-{self.round}/{name}"

    def _has_gone(self, host: RendezvousHost) -> bool:
        return self.line.check(f"gone/{host.token}")

    def _given_up(self) -> bool:
        """We were frozen, and taken for lost."""
        return self.line.check(f"gone/{self.token}")

    def _open(self) -> None:
        if self._moving:
            with contextlib.suppress(StoreGone):  # where it was not the link that broke, somebody waits for us to go
                self.line.set(f"gone/{self.token}", "1")
            self.line.close()
        meeting = self._meet()
        self.stand_ins, self._moving, self.round = meeting.stand_ins, False, -1
        self.line = StoreClient(meeting.store, meeting.where, self._terms.host_timeout)
        self.roll = RoundCoordinator(self.line, self._terms) if meeting.serves else None
        self._card = dataclasses.replace(self._card, serves=meeting.serves)
        # Who served the last store is the one that was lost
        self.lineup = dataclasses.replace(
            self.lineup, hosts=tuple(host for host in self.lineup.hosts if not host.serves)
        )
        self._enter()

    def _enter(self) -> None:
        """Be known at this store, by a name that nobody has given up; the old one is kept where it can be."""
        token = self.token
        if not token or self.line.check(f"gone/{token}"):
            token = uuid.uuid4().hex
            self._past = (None, *self._past[1:])
        self._card = dataclasses.replace(self._card, token=token)
        self.line.set(f"lobby/{self.line.add('lobby', 1) - 1}", token)
        self.line.beat_as(token)

    def _arrive(self, round_: int) -> None:
        ports = network.free_ports(self._card.address, self._terms.procs)
        endpoints = tuple(network.endpoint(self._card.address, port) for port in ports)
        self._card = dataclasses.replace(self._card, endpoints=endpoints, extras=dict(self._extras()))
        self.line.set(f"ready/{self.token}", JoinRequest(round_, self._card, *self._past).to_json())

    def _call_roll(self) -> RoundMembers:
        assert self.roll is not None
        self.round += 1
        self.line.set("round", str(self.round))
        self._arrive(self.round)
        try:
            lineup = self.roll.call(self.round, self.lineup.hosts)
        except StoreGone:
            raise
        except EchelonError as error:
            self.line.set(self.key("lineup"), as_refusal(error).to_json())
            raise
        self.line.set(self.key("lineup"), lineup.to_json())
        return lineup

    def _await_roll(self) -> RoundMembers:
        """Poll rather than block in the store: a signal must be heeded at once."""
        deadline, arrived = time.monotonic() + self._terms.join_timeout, self.round
        notice = WaitNotice("this launcher", self._terms.join_timeout, component="launcher", say=say_wait)
        while True:
            current = int(self.line.find("round") or -1)
            if current > arrived:
                self._arrive(current)
                arrived = current
            text = self.line.find(f"round-{current}/lineup") if current > self.round else None
            if text is not None:
                lineup = RoundMembers.from_json(text)
                if lineup.refusal:
                    raise (UsageError if lineup.mistake else PeerLost)(lineup.refusal)
                if lineup.place_of(self.token) is not None:
                    self.round = current
                    return lineup
                self._stay_in_reserve(lineup, deadline)
            else:
                notice.look(f"the launcher at {self.line.where} to have all {self._terms.nnodes} hosts together")
            time.sleep(POLL)

    def _stay_in_reserve(self, lineup: RoundMembers, deadline: float) -> None:
        if (refusal := self.line.find(f"refused/{self.token}")) is not None:
            raise UsageError(refusal.decode())
        if self.line.check("moved"):
            raise StoreGone(f"the launcher at {self.line.where} has left")
        if (over := self.line.find("over")) is not None:
            if over:
                raise PeerLost(f"the job at {self.line.where} has ended: {over.decode()}")
            raise SpareHostReleased(f"the job at {self.line.where} has ended and did not need this host")
        if len(lineup.hosts) < self._terms.most:
            return
        if not self._terms.elastic and time.monotonic() > deadline:
            raise PeerLost(
                f"the job at {self.line.where} has all its {self._terms.most} hosts already and did not need this one "
                f"within {self._terms.join_timeout:g} s; for another job choose another port"
            )
        if self._terms.elastic and not self._told_of_reserve:
            self._told_of_reserve = True
            self._say(f"the job at {self.line.where} has all its {self._terms.most} hosts; this one waits in reserve")
