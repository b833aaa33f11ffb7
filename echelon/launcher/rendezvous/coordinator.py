"""``RoundCoordinator``: decides, on the host that serves the store, which hosts take part in a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

from echelon.base.errors import PeerLost, UsageError
from echelon.base.formatting import things
from echelon.base.heartbeat_monitor import HeartbeatMonitor
from echelon.base.wait_notice import WaitNotice, say_wait
from echelon.launcher.rendezvous.messages import (
    JoinRequest,
    RendezvousConfig,
    RendezvousHost,
    RoundMembers,
    check_same_nnodes,
    order_elastic_hosts,
    order_hosts,
)
from echelon.launcher.rendezvous.store_client import BEAT, POLL, StoreClient

#: Seconds without a heartbeat after which a host is not waited for. It may still come back.
SUSPECT = 10 * BEAT
#: Seconds that a host of the last round may need beyond --grace to end its ranks.
ENDING = 15.0


class JobMoved(Exception):
    """Another launcher serves the store of this job."""


class HostHeartbeats(HeartbeatMonitor):
    """The heartbeats of hosts, each a counter in the store."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client = client

    def silence(self, peer: Hashable) -> float:
        """Return the seconds since the counter of the host with this token changed."""
        return 0.0 if self.hear(peer, self._client.add(f"beat/{peer}", 0)) else super().silence(peer)

    def first_silent(self, hosts: Sequence[RendezvousHost], seconds: float) -> RendezvousHost | None:
        return next((host for host in hosts if self.silence(host.token) > seconds), None)


class RoundCoordinator:
    def __init__(self, client: StoreClient, config: RendezvousConfig) -> None:
        self._client, self._config = client, config
        self.heartbeats = HostHeartbeats(client)
        self._tokens: list[str] = []
        self._newest = (0, 0.0)
        self._running = False

    def call(
        self, round_: int, last: Sequence[RendezvousHost], has_moved: Callable[[], bool] = lambda: False
    ) -> RoundMembers:
        """Wait until the round is complete. Hosts of the ``last`` round are waited for while they may be alive.

        has_moved: called while hosts are lacking; raise ``JobMoved`` if it returns True
        """
        self._running = bool(last)
        notice = WaitNotice("this launcher", self._config.join_timeout, component="launcher", say=say_wait)
        began, most_here = time.monotonic(), 0
        newest = began
        while True:
            here = self.arrivals(round_)
            if not last:
                check_same_nnodes([arrival.host for arrival in here])
            awaited, now = self._awaited(here, last, began), time.monotonic()
            if len(here) > most_here:
                most_here, newest = len(here), now
            if not awaited and len(here) >= self._config.least:
                called_last = now - newest >= self._config.last_call or len(here) >= self._config.most
                if last or called_last:
                    self._running = True
                    return self._line_up(here)
            if not awaited and now - began > self._config.join_timeout:
                raise self._too_few([arrival.host for arrival in here])
            if not awaited and len(here) < self._config.least and has_moved():
                raise JobMoved
            notice.poll(self._lacking([arrival.host for arrival in here]))
            time.sleep(POLL)

    def arrivals(self, round_: int, without: Collection[str] = ()) -> list[JoinRequest]:
        """Return the hosts that are ready for this round and alive, in the order in which they came to the store."""
        result = []
        for token in self.known():
            text = None if token in without else self._client.find(f"ready/{token}")
            if text is not None and (arrival := JoinRequest.from_json(text)).round == round_:
                result.append(arrival)
        return [one for one in result if self.heartbeats.silence(one.host.token) < SUSPECT and self._fits(one.host)]

    def joiners(self, round_: int, members: Sequence[RendezvousHost]) -> list[RendezvousHost]:
        """Return the hosts that wait to join a running round; none before ``last_call`` seconds without another."""
        if (room := self._config.most - len(members)) <= 0:
            return []
        waiting = [one.host for one in self.arrivals(round_, {host.token for host in members})]
        count, since = self._newest
        if len(waiting) != count:
            count, since = self._newest = len(waiting), time.monotonic()
        called_last = time.monotonic() - since >= self._config.last_call or count >= room
        return waiting[:room] if called_last else []

    def known(self) -> list[str]:
        """Return the tokens of all hosts that have come to this store and have not left it."""
        count = self._client.add("lobby", 0)
        while len(self._tokens) < count:
            token = self._client.find(f"lobby/{len(self._tokens)}")
            if token is None:  # the host has its number, and sets its token in a moment
                break
            self._tokens.append(token.decode())
        return [token for token in self._tokens if not self._client.check(f"gone/{token}")]

    def _awaited(self, here: Sequence[JoinRequest], last: Sequence[RendezvousHost], began: float) -> bool:
        """Return True if a living host has not arrived yet: one of the last round, or one that waited to join."""
        came, known = {arrival.host.token for arrival in here}, self.known()
        waited = time.monotonic() - began
        if waited < self._config.grace + ENDING:
            for host in last:
                lost = host.token in came or self._client.check(f"gone/{host.token}")
                # A host that has not found this store yet may still be ending its ranks of the last round
                patience = SUSPECT if host.token in known else self._config.host_timeout
                if not lost and self.heartbeats.silence(host.token) < patience:
                    return True
        others = [token for token in known if token not in came]
        return waited < SUSPECT and any(self.heartbeats.silence(token) < SUSPECT for token in others)

    def _fits(self, host: RendezvousHost) -> bool:
        """Return False, and refuse the host, if it comes with another --nnodes to a running job."""
        if host.hosts == self._config.nnodes or not self._running:
            return True
        self._client.set(
            f"refused/{host.token}",
            f"the job here runs with --nnodes {self._config.nnodes}, but {host.name} says --nnodes {host.hosts}; "
            "give all the same",
        )
        return False

    def _line_up(self, here: Sequence[JoinRequest]) -> RoundMembers:
        number = 1 + max(arrival.number for arrival in here)
        staying = sorted(here, key=lambda arrival: arrival.place is None)[: self._config.most]
        restarts = max(arrival.restarts for arrival in staying)
        order = (
            order_elastic_hosts(staying)
            if self._config.elastic
            else order_hosts([_seated(arrival) for arrival in staying])
        )
        return RoundMembers(tuple(order), number, restarts)

    def _lacking(self, here: Sequence[RendezvousHost]) -> str:
        """Return text about the missing hosts, for a launcher that waits; '' if enough are here."""
        config, names = self._config, ", ".join(host.name for host in here)
        if len(here) >= config.least:
            return ""
        count = f"{config.least - len(here)} of {config.least}{' or more' if config.elastic else ''} hosts"
        return f"{count} to come to {self._client.where} (here: {names}); start the same command there"

    def _too_few(self, here: Sequence[RendezvousHost]) -> PeerLost:
        config, names = self._config, ", ".join(host.name for host in here)
        within = f"to {self._client.where} within {config.join_timeout:g} s ({names})"
        if config.elastic:
            came = f"{things(len(here), 'host')} came {within}"
            need = f"--nnodes {config.nnodes} needs {config.least}"
            return PeerLost(f"{came}, but {need}; start the same command on others, or give --join-timeout")
        return PeerLost(
            f"{len(here)} of {config.most} hosts came {within}; "
            "start the same command on the others, or give --join-timeout"
        )


def _seated(arrival: JoinRequest) -> RendezvousHost:
    """Return the host with the node rank of its place in the last round, if it had one."""
    return arrival.host if arrival.place is None else replace(arrival.host, node_rank=arrival.place)


def as_refusal(error: Exception) -> RoundMembers:
    """Return the message that other hosts read in place of the members of a round."""
    return RoundMembers(refusal=str(error), mistake=isinstance(error, UsageError))
