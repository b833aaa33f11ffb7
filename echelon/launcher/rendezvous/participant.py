"""``RendezvousParticipant``: one launcher that opens the store, joins rounds, waits as a spare, and leaves."""

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

#: Seconds that the host that serves the store waits for the others to leave it.
FAREWELL = 10.0


class SpareHostReleased(Exception):
    """The job has succeeded while this host waited as a spare."""


@dataclass(frozen=True)
class RendezvousStore:
    """An open store with its endpoint; ``serves``: this process serves it. ``stand_ins``: number of other endpoints."""

    store: Store
    where: str
    serves: bool
    stand_ins: int = 0


class RendezvousParticipant:
    """One launcher at the rendezvous.

    meet:    opens the store; each further call opens it at the next endpoint of --master
    extras:  returns the values of plugins for ``RendezvousHost.extras``
    """

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
        self._past: tuple[int | None, int, int] = (None, -1, 0)  # place, number and restarts of the last round
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
        """The restarts of the whole job, as far as this host knows."""
        return self._past[2]

    def come(self) -> RoundMembers:
        """Wait until the next round is complete and includes this host."""
        if self._moving:
            self._open()
        elif self._given_up():
            self._enter()
        self.lineup = self._call_roll() if self.roll else self._await_roll()
        self._past = self.lineup.place_of(self.token), self.lineup.number, self.lineup.restarts
        return self.lineup

    def move(self) -> None:
        """Use the next endpoint of --master in the next round."""
        self._moving = True

    def accept(self, verdict: RoundOutcome) -> None:
        """Accept the outcome of the round; if the host that serves the store leaves, use the next endpoint."""
        place, number, restarts = self._past
        self._past = place, number, restarts + verdict.counted
        if verdict.cause == "leaving" and any(self._has_gone(host) for host in self.lineup.hosts if host.serves):
            self._moving = True

    def depart(self, line: str = "", goes_on: bool = False) -> None:
        """Leave. The serving host waits until the others have left; they use another endpoint if the job goes on."""
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
        """Return True if this host was frozen and is taken for lost."""
        return self.line.check(f"gone/{self.token}")

    def _open(self) -> None:
        if self._moving:
            with contextlib.suppress(StoreGone):  # if the store still works, the serving host waits for us to leave
                self.line.set(f"gone/{self.token}", "1")
            self.line.close()
        meeting = self._meet()
        self.stand_ins, self._moving, self.round = meeting.stand_ins, False, -1
        self.line = StoreClient(meeting.store, meeting.where, self._terms.host_timeout)
        self.roll = RoundCoordinator(self.line, self._terms) if meeting.serves else None
        self._card = dataclasses.replace(self._card, serves=meeting.serves)
        # The host that served the last store is the one that was lost
        self.lineup = dataclasses.replace(
            self.lineup, hosts=tuple(host for host in self.lineup.hosts if not host.serves)
        )
        self._enter()

    def _enter(self) -> None:
        """Register at this store with a token that has not been given up; the old token is kept if possible."""
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
        """Wait for the members of the next round by polling, because a blocking call would delay signals."""
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
