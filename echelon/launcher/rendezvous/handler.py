"""Where the launchers of all hosts meet: who is there, in which order, and how each attempt ended.

It takes the place of torch's DynamicRendezvousHandler, which unpickles its state from a store that anybody who
reaches the port may write to, orders hosts by address, and cannot say who is missing. This one keeps JSON in the
store and honours --node-rank. On one host the store is a table in our own memory.

For every attempt ("round") the launcher that serves the store calls the roll (roll.py), and the first host serves a
fresh store to the ranks. torch's own agent keeps one store over restarts, and its stale keys are what makes a
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

#: A host that gives no sign of life for so long when a rank has just lost a peer is what it lost.
LOST_AFTER = 6 * BEAT
STORE_TIMEOUT = timedelta(seconds=60)


class RoundEnded(Exception):
    """A round was over before its ranks could start."""

    def __init__(self, verdict: RoundOutcome) -> None:
        super().__init__(verdict.failure.line)
        self.verdict = verdict


class LauncherRendezvous(RendezvousHandler):
    def __init__(self, attendance: RendezvousParticipant, terms: RendezvousConfig) -> None:
        self._attendance, self._terms = attendance, terms
        self._rank_store: TCPStore | None = None
        self._rank_store_at = ("", 0)

    # What torch's agent asks of a rendezvous

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

    # What our agent asks during a round

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
        """Whether we have the first place of the round; nobody has one before there was a round."""
        return self.lineup.place_of(self._attendance.token) == 0

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for host in self.hosts for endpoint in host.endpoints]

    def as_round(self, log_dir: Path) -> Round:
        board = self._board("board")
        return Round(self.lineup.number, self.node_rank, self.hosts, board, self._rank_store_at, log_dir)

    def settle(self, failure: Failure, cause: Cause = "failed", gone: str = "") -> RoundOutcome:
        """End this round because of ``failure``. The first host to say so is the one all believe."""
        if gone:
            self._line.set(f"gone/{gone}", "1")
        counted = cause in ("failed", "stuck") or (cause == "lost" and not self._terms.elastic)
        proposal = RoundOutcome(failure, self._may_go_again(failure, cause, counted), cause, counted)
        return RoundOutcome.from_json(self._line.compare_set(self._key("verdict"), "", proposal.to_json()))

    def leave_rendezvous(self, failure: Failure) -> RoundOutcome:
        """This host leaves by its own will; an elastic job goes on when enough others are there."""
        return self.settle(failure, "leaving", self._attendance.token)

    def verdict(self) -> RoundOutcome | None:
        text = self._line.find(self._key("verdict"))
        return None if text is None else RoundOutcome.from_json(text)

    def accept(self, verdict: RoundOutcome) -> None:
        """The round is over by this verdict, and we go again."""
        self._attendance.accept(verdict)

    def depart(self, last_word: str, goes_on: bool) -> None:
        self._attendance.depart(last_word, goes_on)

    def ended(self) -> None:
        """The ranks of this host are gone."""
        if self.hosts:
            self._line.set(self._key(f"ended/{self.node_rank}"), "1")

    def wait_for_other_hosts(self, seconds: float) -> None:
        """Where the store of the ranks is ours: keep it until those of the other hosts have saved and ended."""
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
        """All ranks of this host are done."""
        self._line.set(self._key(f"done/{self.node_rank}"), "1")

    def all_finished(self) -> bool:
        return self._line.check(*(self._key(f"done/{place}") for place in range(len(self.hosts))))

    def changed_hosts(self) -> RoundOutcome | None:
        """On the host that calls the roll: the end of this round because a host was lost, or has come."""
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
        """A rank lost a peer: was it a whole host? Watch the beats of all for a moment, and what others say."""
        roll, deadline = self._attendance.roll, time.monotonic() + LOST_AFTER
        pulse = (
            roll.pulse if roll else HeartbeatMonitor(self._line)
        )  # who calls the roll has been listening all the time
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
        """The store is gone: the verdict, when there is another place to meet; else raises."""
        elastic = self._terms.elastic
        if not self._attendance.stand_ins or not (elastic or self._attendance.restarts < self._terms.max_restarts):
            raise gone
        self._attendance.move()
        names = [host.name for host in self.hosts if host.serves] or [self._line.where]
        how = f"was lost (its launcher at {self._line.where} does not answer any more)"
        return RoundOutcome(host_failure(names[0], how, 1), True, "lost", not elastic)

    def _open_rank_store(self) -> tuple[str, int]:
        """Where the ranks of this host reach the store that the first host serves to all ranks."""
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
            return False  # what is explained in one line would come again
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
