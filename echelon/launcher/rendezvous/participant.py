"""``RendezvousParticipant``: one launcher that opens the store, joins rounds, waits as a spare, and leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from echelon.base import network
from echelon.base.errors import EchelonError, PeerLost, UsageError
from echelon.base.wait_notice import WaitNotice, say_wait
from echelon.launcher.rendezvous.coordinator import SUSPECT, JobMoved, RoundCoordinator, as_refusal
from echelon.launcher.rendezvous.messages import (
    JoinRequest,
    RendezvousConfig,
    RendezvousHost,
    RoundMembers,
    RoundOutcome,
)
from echelon.launcher.rendezvous.store_client import POLL, StoreClient, StoreLost

#: Seconds that the host that serves the store waits for the others to leave it.
FAREWELL = 10.0


class SpareHostReleased(Exception):
    """The job has succeeded while this host waited as a spare."""


@dataclass(frozen=True)
class RendezvousStore:
    """An open store with its endpoint; ``serves``: this process serves it. ``fallbacks``: number of other endpoints."""

    store: Store
    where: str
    serves: bool
    fallbacks: int = 0


class MeetingPlace(Protocol):
    """Opens the store; each further call opens it at the next endpoint of --master."""

    def __call__(self) -> RendezvousStore: ...

    def has_moved(self) -> bool:
        """Return True if the job is at another endpoint, which the next call opens."""
        ...


class RendezvousParticipant:
    """One launcher at the rendezvous.

    meet:    opens the store
    extras:  returns the values of plugins for ``RendezvousHost.extras``
    """

    def __init__(
        self,
        meet: MeetingPlace,
        config: RendezvousConfig,
        *,
        name: str,
        address: str,
        node_rank: int | None,
        extras: Callable[[], Mapping[str, str]],
        say: Callable[[str], None],
    ) -> None:
        self._meet, self._config, self._extras, self._say = meet, config, extras, say
        self._host = RendezvousHost("", name, address, (), config.nnodes, node_rank, False)
        self._past: tuple[int | None, int, int] = (None, -1, 0)  # place, number and restarts of the last round
        self._is_reserve_announced = False
        self._moving = False
        self.is_in_round = False  #: it has a place in a round whose outcome it has not accepted
        self.members = RoundMembers()
        self.client: StoreClient
        self._open()

    @property
    def token(self) -> str:
        return self._host.token

    @property
    def restarts(self) -> int:
        """The restarts of the whole job, as far as this host knows."""
        return self._past[2]

    def come(self) -> RoundMembers:
        """Wait until the next round is complete and includes this host."""
        while True:
            if self._moving:
                self._open()
            elif self._gave_up():
                self._enter()
            try:
                self.members = self._form_round() if self.coordinator else self._await_round()
                break
            except JobMoved:
                self._moving = True
        self._past = self.members.place_of(self.token), self.members.number, self.members.restarts
        self.is_in_round = True
        return self.members

    def move(self) -> None:
        """Use the next endpoint of --master in the next round."""
        self._moving = True

    def accept(self, outcome: RoundOutcome) -> None:
        """Accept the outcome of the round; if the host that serves the store leaves, use the next endpoint."""
        place, number, restarts = self._past
        self._past, self.is_in_round = (place, number, restarts + outcome.counted), False
        if outcome.cause == "leaving" and any(self._has_gone(host) for host in self.members.hosts if host.serves):
            self._moving = True

    def depart(self, line: str = "", goes_on: bool = False) -> None:
        """Leave. The serving host waits until the others have left; they use another endpoint if the job goes on."""
        self.client.set(f"gone/{self.token}", "1")
        if self.coordinator is None:
            return
        if not self.client.check(self.key("members")):
            self.client.set(
                self.key("members"), RoundMembers(refusal=line or "the launcher of the first host has left").to_json()
            )
        self.client.set("moved" if goes_on else "over", line)
        deadline = time.monotonic() + FAREWELL
        heartbeats = self.coordinator.heartbeats
        while time.monotonic() < deadline and any(
            heartbeats.silence(each) < SUSPECT for each in self.coordinator.known()
        ):
            time.sleep(POLL)

    def key(self, name: str) -> str:
        return f"round-{self.round}/{name}"

    def _has_gone(self, host: RendezvousHost) -> bool:
        return self.client.check(f"gone/{host.token}")

    def _gave_up(self) -> bool:
        """Return True if this host was frozen and is taken for lost."""
        return self.client.check(f"gone/{self.token}")

    def _open(self) -> None:
        if self._moving:
            with contextlib.suppress(StoreLost):  # if the store still works, the serving host waits for us to leave
                self.client.set(f"gone/{self.token}", "1")
            self.client.close()
        meeting = self._meet()
        self.fallbacks, self._moving, self.round = meeting.fallbacks, False, -1
        self.client = StoreClient(meeting.store, meeting.where, self._config.host_timeout)
        self.coordinator = RoundCoordinator(self.client, self._config) if meeting.serves else None
        self._host = dataclasses.replace(self._host, serves=meeting.serves)
        # The host that served the last store is the one that was lost
        self.members = dataclasses.replace(
            self.members, hosts=tuple(host for host in self.members.hosts if not host.serves)
        )
        self._enter()

    def _enter(self) -> None:
        """Register at this store with a token that has not been given up; the old token is kept if possible.

        At a store that this host has left and comes back to, the old token may still have a place in a running round.
        """
        token = self.token
        if not token or self._gave_up() or self.client.check(f"ready/{token}"):
            token = uuid.uuid4().hex
            self._past = (None, *self._past[1:])
        self._host = dataclasses.replace(self._host, token=token)
        self.client.set(f"lobby/{self.client.add('lobby', 1) - 1}", token)
        self.client.beat_as(token)

    def _arrive(self, round_: int) -> None:
        ports = network.free_ports(self._host.address, self._config.procs)
        endpoints = tuple(network.endpoint(self._host.address, port) for port in ports)
        self._host = dataclasses.replace(self._host, endpoints=endpoints, extras=dict(self._extras()))
        self.client.set(f"ready/{self.token}", JoinRequest(round_, self._host, *self._past).to_json())

    def _form_round(self) -> RoundMembers:
        assert self.coordinator is not None
        self.round += 1
        self.client.set("round", str(self.round))
        self._arrive(self.round)
        try:
            members = self.coordinator.call(self.round, self.members.hosts, self._meet.has_moved)
        except StoreLost:
            raise
        except EchelonError as error:
            self.client.set(self.key("members"), as_refusal(error).to_json())
            raise
        self.client.set(self.key("members"), members.to_json())
        return members

    def _await_round(self) -> RoundMembers:
        """Wait for the members of the next round by polling, because a blocking call would delay signals."""
        deadline, arrived = time.monotonic() + self._config.join_timeout, self.round
        notice = WaitNotice("this launcher", self._config.join_timeout, component="launcher", say=say_wait)
        while True:
            current = int(self.client.find("round") or -1)
            if current > arrived:
                self._arrive(current)
                arrived = current
            text = self.client.find(f"round-{current}/members") if current > self.round else None
            if text is not None:
                members = RoundMembers.from_json(text)
                if members.refusal:
                    raise (UsageError if members.mistake else PeerLost)(members.refusal)
                if members.place_of(self.token) is not None:
                    self.round = current
                    return members
                self._stay_in_reserve(members, deadline)
            else:
                notice.poll(f"the launcher at {self.client.where} to have all {self._config.nnodes} hosts together")
            time.sleep(POLL)

    def _stay_in_reserve(self, members: RoundMembers, deadline: float) -> None:
        if (refusal := self.client.find(f"refused/{self.token}")) is not None:
            raise UsageError(refusal.decode())
        if self.client.check("moved"):
            raise StoreLost(f"the launcher at {self.client.where} has left")
        if (over := self.client.find("over")) is not None:
            if over:
                raise PeerLost(f"the job at {self.client.where} has ended: {over.decode()}")
            raise SpareHostReleased(f"the job at {self.client.where} has ended and did not need this host")
        if len(members.hosts) < self._config.most:
            return
        if not self._config.elastic and time.monotonic() > deadline:
            raise PeerLost(
                f"the job at {self.client.where} has all its {self._config.most} hosts already and did not need this "
                f"one within {self._config.join_timeout:g} s; for another job choose another port"
            )
        if self._config.elastic and not self._is_reserve_announced:
            self._is_reserve_announced = True
            self._say(
                f"the job at {self.client.where} has all its {self._config.most} hosts; this one waits in reserve"
            )
