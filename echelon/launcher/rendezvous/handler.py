"""``LauncherRendezvous``: the rendezvous of the launchers of all hosts, their order, and the outcome of each round.

It replaces torch's DynamicRendezvousHandler, which unpickles its state from a store to which anything that reaches the
port may write, orders hosts by address, and cannot say which hosts are missing. This one keeps JSON in the store and
honors --node-rank. On one host the store is a table in this process's memory.

For every attempt ("round") the launcher that serves the store coordinates the round (coordinator.py), and the first
host serves a new store to the ranks. torch's own agent keeps one store over restarts, and its stale keys make a
restarted Gloo group hang.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from echelon.base.auth_proxy import local_store_endpoint, serve_store
from echelon.base.errors import PeerLost
from echelon.base.job_secret import find_token
from echelon.launcher.agent_plugin import Round
from echelon.launcher.failure import Failure
from echelon.launcher.rendezvous.coordinator import SUSPECT, HostHeartbeats
from echelon.launcher.rendezvous.messages import (
    Cause,
    RendezvousConfig,
    RendezvousHost,
    RoundMembers,
    RoundOutcome,
    host_failure,
)
from echelon.launcher.rendezvous.participant import RendezvousParticipant
from echelon.launcher.rendezvous.store_client import BEAT, POLL, RoundStore, StoreClient, StoreLost

#: Seconds without a heartbeat after which a host is taken to be the peer that a rank has just lost.
LOST_AFTER = 6 * BEAT
STORE_TIMEOUT = timedelta(seconds=60)


class RoundEnded(Exception):
    """A round ended before its ranks could start."""

    def __init__(self, outcome: RoundOutcome) -> None:
        super().__init__(outcome.failure.line)
        self.outcome = outcome


class LauncherRendezvous(RendezvousHandler):
    def __init__(self, participant: RendezvousParticipant, config: RendezvousConfig) -> None:
        self._participant, self._config = participant, config
        self._rank_store: TCPStore | None = None
        self._rank_store_at = ("", 0)

    # The interface of torch's RendezvousHandler

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the next round is complete, and open the ranks' store at its first host."""
        self._participant.come()
        address, port = self._rank_store_at = self._open_rank_store()
        return RendezvousInfo(
            self._open_store("torch"), self.node_rank, len(self.hosts), RendezvousStoreInfo(address, port)
        )

    def get_backend(self) -> str:
        return "echelon"

    def get_run_id(self) -> str:
        return "echelon"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    # Methods for HostAgent during a round

    @property
    def members(self) -> RoundMembers:
        return self._participant.members

    @property
    def hosts(self) -> tuple[RendezvousHost, ...]:
        return self.members.hosts

    @property
    def restarts(self) -> int:
        """The restarts of the whole job, as far as this host knows."""
        return self._participant.restarts

    @property
    def node_rank(self) -> int:
        place = self.members.place_of(self._participant.token)
        assert place is not None
        return place

    @property
    def is_first(self) -> bool:
        """True if this host is the first of the round; False before there was a round."""
        return self.members.place_of(self._participant.token) == 0

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for host in self.hosts for endpoint in host.endpoints]

    def as_round(self, log_dir: Path) -> Round:
        store = self._open_store("board")
        return Round(self.members.number, self.node_rank, self.hosts, store, self._rank_store_at, log_dir)

    def settle(self, failure: Failure, cause: Cause = "failed", lost: str = "") -> RoundOutcome:
        """End this round because of ``failure``. The outcome of the first host that calls it holds for all."""
        if lost:
            self._client.set(f"gone/{lost}", "1")
        counted = cause in ("failed", "stuck") or (cause == "lost" and not self._config.elastic)
        proposal = RoundOutcome(failure, self._may_go_again(failure, cause, counted), cause, counted)
        return RoundOutcome.from_json(self._client.compare_set(self._key("verdict"), "", proposal.to_json()))

    def leave_rendezvous(self, failure: Failure) -> RoundOutcome:
        """Leave the job voluntarily; an elastic job continues if enough other hosts remain."""
        return self.settle(failure, "leaving", self._participant.token)

    def outcome(self) -> RoundOutcome | None:
        text = self._client.find(self._key("verdict"))
        return None if text is None else RoundOutcome.from_json(text)

    def accept(self, outcome: RoundOutcome) -> None:
        """Accept the outcome of the round, and take part in the next one."""
        self._participant.accept(outcome)

    def depart(self, last_word: str, goes_on: bool) -> None:
        self._participant.depart(last_word, goes_on)

    def ended(self) -> None:
        """Announce that the ranks of this host have ended."""
        # A host that was given up and is back at another store has no place among the last hosts that it knows
        if (place := self.members.place_of(self._participant.token)) is not None:
            self._client.set(self._key(f"ended/{place}"), "1")

    def wait_for_other_hosts(self, seconds: float) -> None:
        """Keep the ranks' store, if this host serves it, until the ranks of the other hosts have saved and ended."""
        heartbeats, deadline = HostHeartbeats(self._client), time.monotonic() + seconds
        awaited = list(enumerate(self.hosts)) if self._rank_store is not None else []
        while awaited and time.monotonic() < deadline:
            awaited = [
                (place, host)
                for place, host in awaited
                if not self._client.check(self._key(f"ended/{place}")) and heartbeats.silence(host.token) < SUSPECT
            ]
            time.sleep(POLL / 2)

    def finish(self) -> None:
        """Announce that all ranks of this host are done."""
        self._client.set(self._key(f"done/{self.node_rank}"), "1")

    def all_finished(self) -> bool:
        return self._client.check(*(self._key(f"done/{place}") for place in range(len(self.hosts))))

    def changed_hosts(self) -> RoundOutcome | None:
        """Return the outcome of a round that a lost or new host ends; None on hosts other than the coordinator."""
        if self._participant.coordinator is None:
            return None
        others = [host for host in self.hosts if host.token != self._participant.token]
        if silent := self._participant.coordinator.heartbeats.first_silent(others, self._config.host_timeout):
            return self.lose(silent, self._config.host_timeout)
        if self._config.elastic and (
            joiners := self._participant.coordinator.joiners(self._participant.round, self.hosts)
        ):
            names = ", ".join(host.name for host in joiners)
            return self.settle(host_failure(names, "joined", 0), "joined")
        return None

    def find_lost(self) -> RoundOutcome | None:
        """Find out if a rank's lost peer means a lost host: watch all heartbeats and the outcome for a moment."""
        coordinator, deadline = self._participant.coordinator, time.monotonic() + LOST_AFTER
        # The coordinator has been watching heartbeats all the time
        heartbeats = coordinator.heartbeats if coordinator else HostHeartbeats(self._client)
        unheard = [host for host in self.hosts if host.token != self._participant.token]
        for host in unheard:
            heartbeats.silence(host.token)
        while unheard:
            if (outcome := self.outcome()) is not None:
                return outcome
            if (silent := heartbeats.first_silent(unheard, LOST_AFTER)) or time.monotonic() > deadline:
                return self.lose(silent or unheard[0], LOST_AFTER)
            time.sleep(POLL)
            unheard = [host for host in unheard if heartbeats.silence(host.token) > 0]
        return None

    def lose(self, host: RendezvousHost, seconds: float) -> RoundOutcome:
        failure = host_failure(host.name, f"was lost (no heartbeat for {seconds:g} s; is it up?)", 1)
        return self.settle(failure, "lost", host.token)

    def recover_lost_store(self, lost: StoreLost) -> RoundOutcome:
        """Return the outcome after the store was lost, if there is another endpoint to meet at; else raise."""
        elastic = self._config.elastic
        counted = not elastic and self._participant.is_in_round  # a spare has no ranks to restart
        if not self._participant.fallbacks or (counted and self._participant.restarts >= self._config.max_restarts):
            raise lost
        self._participant.move()
        names = [host.name for host in self.hosts if host.serves] or [self._client.where]
        how = f"was lost (its launcher at {self._client.where} no longer answers)"
        return RoundOutcome(host_failure(names[0], how, 1), True, "lost", counted)

    def _open_rank_store(self) -> tuple[str, int]:
        """Return the endpoint at which ranks of this host reach the store that the first host serves to all ranks."""
        key, first = self._key("rank-store"), self.hosts[0]
        secret = find_token() if self._config.most > 1 else None
        if self.node_rank == 0:
            self._rank_store, port = serve_store(first.address, 0, secret, STORE_TIMEOUT)
            self._client.set(key, str(port))
        heartbeats = HostHeartbeats(self._client)
        while (text := self._client.find(key)) is None:
            if (outcome := self.outcome()) is not None:
                raise RoundEnded(outcome)
            if heartbeats.silence(first.token) > SUSPECT:
                raise RoundEnded(self.lose(first, SUSPECT))
            time.sleep(POLL)
        try:
            return local_store_endpoint(first.address, int(text), secret)
        except PeerLost:
            if (outcome := self.find_lost()) is not None:
                raise RoundEnded(outcome) from None
            raise

    def _may_go_again(self, failure: Failure, cause: Cause, counted: bool) -> bool:
        if cause == "left" or (cause == "failed" and failure.explained and not failure.secondary):
            return False  # a failure that one line explains would recur
        if cause == "leaving":
            is_store_kept = self._participant.coordinator is None or self._participant.fallbacks > 0
            return self._config.elastic and is_store_kept and len(self.hosts) > self._config.least
        return not counted or self._participant.restarts < self._config.max_restarts

    def _open_store(self, name: str) -> RoundStore:
        return RoundStore(self._client, self._key(f"{name}/"), self._config.host_timeout)

    def _key(self, name: str) -> str:
        return self._participant.key(name)

    @property
    def _client(self) -> StoreClient:
        return self._participant.client
