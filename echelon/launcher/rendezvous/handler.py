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
from echelon.launcher.rendezvous.coordinator import SUSPECT, HeartbeatMonitor
from echelon.launcher.rendezvous.messages import (
    Cause,
    RendezvousConfig,
    RendezvousHost,
    RoundMembers,
    RoundOutcome,
    host_failure,
)
from echelon.launcher.rendezvous.participant import RendezvousParticipant
from echelon.launcher.rendezvous.store_client import BEAT, POLL, RoundStore, StoreClient, StoreGone

#: Seconds without a heartbeat after which a host is taken to be the peer that a rank has just lost.
LOST_AFTER = 6 * BEAT
STORE_TIMEOUT = timedelta(seconds=60)


class RoundEnded(Exception):
    """A round ended before its ranks could start."""

    def __init__(self, verdict: RoundOutcome) -> None:
        super().__init__(verdict.failure.line)
        self.verdict = verdict


class LauncherRendezvous(RendezvousHandler):
    def __init__(self, attendance: RendezvousParticipant, terms: RendezvousConfig) -> None:
        self._attendance, self._terms = attendance, terms
        self._rank_store: TCPStore | None = None
        self._rank_store_at = ("", 0)

    # The interface of torch's RendezvousHandler

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the next round is complete, and open the ranks' store at its first host."""
        self._attendance.come()
        address, port = self._rank_store_at = self._open_rank_store()
        return RendezvousInfo(self._board("torch"), self.node_rank, len(self.hosts), RendezvousStoreInfo(address, port))

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
    def lineup(self) -> RoundMembers:
        return self._attendance.lineup

    @property
    def hosts(self) -> tuple[RendezvousHost, ...]:
        return self.lineup.hosts

    @property
    def node_rank(self) -> int:
        place = self.lineup.place_of(self._attendance.token)
        assert place is not None
        return place

    @property
    def is_first(self) -> bool:
        """True if this host is the first of the round; False before there was a round."""
        return self.lineup.place_of(self._attendance.token) == 0

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for host in self.hosts for endpoint in host.endpoints]

    def as_round(self, log_dir: Path) -> Round:
        board = self._board("board")
        return Round(self.lineup.number, self.node_rank, self.hosts, board, self._rank_store_at, log_dir)

    def settle(self, failure: Failure, cause: Cause = "failed", gone: str = "") -> RoundOutcome:
        """End this round because of ``failure``. The outcome of the first host that calls it holds for all."""
        if gone:
            self._line.set(f"gone/{gone}", "1")
        counted = cause in ("failed", "stuck") or (cause == "lost" and not self._terms.elastic)
        proposal = RoundOutcome(failure, self._may_go_again(failure, cause, counted), cause, counted)
        return RoundOutcome.from_json(self._line.compare_set(self._key("verdict"), "", proposal.to_json()))

    def leave_rendezvous(self, failure: Failure) -> RoundOutcome:
        """Leave the job voluntarily; an elastic job continues if enough other hosts remain."""
        return self.settle(failure, "leaving", self._attendance.token)

    def verdict(self) -> RoundOutcome | None:
        text = self._line.find(self._key("verdict"))
        return None if text is None else RoundOutcome.from_json(text)

    def accept(self, verdict: RoundOutcome) -> None:
        """Accept the outcome of the round, and take part in the next one."""
        self._attendance.accept(verdict)

    def depart(self, last_word: str, goes_on: bool) -> None:
        self._attendance.depart(last_word, goes_on)

    def ended(self) -> None:
        """Announce that the ranks of this host have ended."""
        if self.hosts:
            self._line.set(self._key(f"ended/{self.node_rank}"), "1")

    def wait_for_other_hosts(self, seconds: float) -> None:
        """Keep the ranks' store, if this host serves it, until the ranks of the other hosts have saved and ended."""
        pulse, deadline = HeartbeatMonitor(self._line), time.monotonic() + seconds
        awaited = list(enumerate(self.hosts)) if self._rank_store is not None else []
        while awaited and time.monotonic() < deadline:
            awaited = [
                (place, host)
                for place, host in awaited
                if not self._line.check(self._key(f"ended/{place}")) and pulse.silence(host.token) < SUSPECT
            ]
            time.sleep(POLL / 2)

    def finish(self) -> None:
        """Announce that all ranks of this host are done."""
        self._line.set(self._key(f"done/{self.node_rank}"), "1")

    def all_finished(self) -> bool:
        return self._line.check(*(self._key(f"done/{place}") for place in range(len(self.hosts))))

    def changed_hosts(self) -> RoundOutcome | None:
        """Return the outcome of a round that a lost or new host ends; None on hosts other than the coordinator."""
        if self._attendance.roll is None:
            return None
        others = [host for host in self.hosts if host.token != self._attendance.token]
        if silent := self._attendance.roll.pulse.first_silent(others, self._terms.host_timeout):
            return self.lose(silent, self._terms.host_timeout)
        if self._terms.elastic and (joiners := self._attendance.roll.joiners(self._attendance.round, self.hosts)):
            names = ", ".join(host.name for host in joiners)
            return self.settle(host_failure(names, "joined", 0), "joined")
        return None

    def find_lost(self) -> RoundOutcome | None:
        """Find out if a rank's lost peer means a lost host: watch all heartbeats and the outcome for a moment."""
        roll, deadline = self._attendance.roll, time.monotonic() + LOST_AFTER
        pulse = (
            roll.pulse if roll else HeartbeatMonitor(self._line)
        )  # the coordinator has been watching heartbeats all the time
        unheard = [host for host in self.hosts if host.token != self._attendance.token]
        for host in unheard:
            pulse.silence(host.token)
        while unheard:
            if (verdict := self.verdict()) is not None:
                return verdict
            if (silent := pulse.first_silent(unheard, LOST_AFTER)) or time.monotonic() > deadline:
                return self.lose(silent or unheard[0], LOST_AFTER)
            time.sleep(POLL)
            unheard = [host for host in unheard if pulse.silence(host.token) > 0]
        return None

    def lose(self, host: RendezvousHost, seconds: float) -> RoundOutcome:
        failure = host_failure(host.name, f"was lost (not heard of for {seconds:g} s; is it up?)", 1)
        return self.settle(failure, "lost", host.token)

    def recover_lost_store(self, gone: StoreGone) -> RoundOutcome:
        """Return the outcome after the store was lost, if there is another endpoint to meet at; else raise."""
        elastic = self._terms.elastic
        if not self._attendance.stand_ins or not (elastic or self._attendance.restarts < self._terms.max_restarts):
            raise gone
        self._attendance.move()
        names = [host.name for host in self.hosts if host.serves] or [self._line.where]
        how = f"was lost (its launcher at {self._line.where} does not answer any more)"
        return RoundOutcome(host_failure(names[0], how, 1), True, "lost", not elastic)

    def _open_rank_store(self) -> tuple[str, int]:
        """Return the endpoint at which ranks of this host reach the store that the first host serves to all ranks."""
        key, first = self._key("rank-store"), self.hosts[0]
        secret = find_token() if self._terms.most > 1 else None
        if self.node_rank == 0:
            self._rank_store, port = serve_store(first.address, 0, secret, STORE_TIMEOUT)
            self._line.set(key, str(port))
        pulse = HeartbeatMonitor(self._line)
        while (text := self._line.find(key)) is None:
            if (verdict := self.verdict()) is not None:
                raise RoundEnded(verdict)
            if pulse.silence(first.token) > SUSPECT:
                raise RoundEnded(self.lose(first, SUSPECT))
            time.sleep(POLL)
        try:
            return local_store_endpoint(first.address, int(text), secret)
        except PeerLost:
            if (verdict := self.find_lost()) is not None:
                raise RoundEnded(verdict) from None
            raise

    def _may_go_again(self, failure: Failure, cause: Cause, counted: bool) -> bool:
        if cause == "left" or (cause == "failed" and failure.explained and not failure.secondary):
            return False  # a failure that one line explains would recur
        if cause == "leaving":
            served = self._attendance.roll is None or self._attendance.stand_ins > 0
            return self._terms.elastic and served and len(self.hosts) > self._terms.least
        return not counted or self._attendance.restarts < self._terms.max_restarts

    def _board(self, name: str) -> RoundStore:
        return RoundStore(self._line, self._key(f"{name}/"), self._terms.host_timeout)

    def _key(self, name: str) -> str:
        return self._attendance.key(name)

    @property
    def _line(self) -> StoreClient:
        return self._attendance.line
