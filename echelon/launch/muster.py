"""Where the launchers of all hosts meet: who is there, in which order, and how each attempt ended.

It takes the place of torch's DynamicRendezvousHandler, which unpickles its state from a store that anybody who
reaches the port may write to, orders hosts by address, and cannot say who is missing. This one keeps JSON in the
store, has a fixed number of hosts, and honours --node-rank. On one host the store is a table in our own memory.

For every attempt ("round") the first host serves a fresh store to the ranks. torch's own agent keeps one store
over restarts, and its stale keys are what makes a restarted Gloo group hang.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from echelon.errors import PeerLost, UsageError
from echelon.launch import network
from echelon.launch.failure import Failure

POLL = 0.1
#: A host whose launcher has not been heard of for so many seconds is taken for lost.
SILENCE = 30.0
#: How long the host that serves the store waits for the others to take leave of it.
FAREWELL = 10.0
STORE_TIMEOUT = timedelta(seconds=60)

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """A launcher's card, laid on the table when it comes to the muster."""

    token: str
    name: str
    address: str
    endpoints: tuple[str, ...]
    hosts: int
    node_rank: int | None
    serves: bool

    @staticmethod
    def from_json(text: bytes) -> Host:
        card = json.loads(text)
        endpoints = tuple(str(item) for item in card["endpoints"])
        node_rank = None if card["node_rank"] is None else int(card["node_rank"])
        name, address = str(card["name"]), str(card["address"])
        return Host(str(card["token"]), name, address, endpoints, int(card["hosts"]), node_rank, bool(card["serves"]))


@dataclass(frozen=True)
class Verdict:
    """How a round ended: whom to blame, and whether all go again."""

    failure: Failure
    again: bool


def arrange(cards: Sequence[Host]) -> list[Host]:
    """The hosts in order: --node-rank where given; else the serving host first, then by address and arrival."""
    places: dict[int, Host] = {}
    for card in cards:
        if card.hosts != len(cards):
            names = f"{cards[0].name} says --nnodes {cards[0].hosts}, {card.name} says --nnodes {card.hosts}"
            raise UsageError(f"the hosts disagree on their number: {names}; give all the same")
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


class Muster(RendezvousHandler):
    def __init__(
        self, store: Store, *, where: str, name: str, address: str, procs: int, hosts: int, node_rank: int | None,
        serves: bool, join_timeout: float, max_restarts: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._where = where
        self._join_timeout = join_timeout
        self._max_restarts = max_restarts
        self._card = Host(uuid.uuid4().hex, name, address, (), hosts, node_rank, serves)
        self._procs = procs
        self._rank_store: TCPStore | None = None
        self._heard: dict[int, tuple[int, float]] = {}
        self.round = -1
        self.hosts: list[Host] = []

    # What torch's agent asks of a rendezvous

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts, agree on their order, and open the ranks' store at the first of them."""
        deadline = time.monotonic() + self._join_timeout
        self._join_round(deadline)
        self.hosts = arrange(self._gather(deadline))
        self._card = dataclasses.replace(self._card, node_rank=self.node_rank)  # kept over restarts
        self._heard.clear()
        address, port = self._open_rank_store(deadline)
        inner = PrefixStore(self._key("torch"), self._store)
        return RendezvousInfo(inner, self.node_rank, len(self.hosts), RendezvousStoreInfo(address, port))

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
    def node_rank(self) -> int:
        return next(place for place, host in enumerate(self.hosts) if host.token == self._card.token)

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for host in self.hosts for endpoint in host.endpoints]

    def settle(self, failure: Failure) -> Verdict:
        """End this round because of ``failure``. The first host to say so is the one all believe."""
        proposal = {"failure": failure.to_json(), "again": failure.rank >= 0 and self.round < self._max_restarts}
        key = self._key("verdict")
        return _read_verdict(self._ask(self._store.compare_set, key, "", json.dumps(proposal)))

    def verdict(self) -> Verdict | None:
        key = self._key("verdict")
        return _read_verdict(self._ask(self._store.get, key)) if self._ask(self._store.check, [key]) else None

    def finish(self) -> None:
        """All ranks of this host are done."""
        self._ask(self._store.set, self._key(f"done/{self.node_rank}"), "1")

    def all_finished(self) -> bool:
        return bool(self._ask(self._store.check, [self._key(f"done/{n}") for n in range(len(self.hosts))]))

    def beat(self) -> None:
        """Tell the first host that we live."""
        if len(self.hosts) > 1:
            self._ask(self._store.add, self._key(f"beat/{self.node_rank}"), 1)

    def silent_host(self) -> Host | None:
        """On the first host: one that has not been heard of for too long. The others miss the first by its store."""
        if self.node_rank != 0:
            return None
        now = time.monotonic()
        for place in range(1, len(self.hosts)):
            beats = int(self._ask(self._store.add, self._key(f"beat/{place}"), 0))
            if self._heard.get(place, (-1, 0.0))[0] != beats:
                self._heard[place] = (beats, now)
            elif now - self._heard[place][1] > SILENCE:
                return self.hosts[place]
        return None

    def depart(self) -> None:
        """Take leave; the host that serves the store stays until the others have."""
        if not self._card.serves or self.round < 0:
            if self.round >= 0:
                self._ask(self._store.add, self._key("left"), 1)
            return
        deadline = time.monotonic() + FAREWELL
        others = int(self._ask(self._store.add, self._key("arrived"), 0)) - 1
        while int(self._ask(self._store.add, self._key("left"), 0)) < others and time.monotonic() < deadline:
            time.sleep(POLL)

    # Meeting

    def _join_round(self, deadline: float) -> None:
        """Lay our card on the table of the first round that has room; a replacement host finds it by itself."""
        self.round += 1
        while True:
            if (verdict := self.verdict()) is None:
                place = int(self._ask(self._store.add, self._key("arrived"), 1)) - 1
                if place < self._card.hosts:
                    return self._lay_card(place)
                verdict = self._await(self.verdict, deadline, self._too_many)
            if not verdict.again:
                raise PeerLost(f"the job at {self._where} has ended: {verdict.failure.line}")
            self.round += 1

    def _lay_card(self, place: int) -> None:
        ports = network.free_ports(self._card.address, self._procs)
        endpoints = tuple(network.endpoint(self._card.address, port) for port in ports)
        self._card = dataclasses.replace(self._card, endpoints=endpoints)
        self._ask(self._store.set, self._key(f"host/{place}"), json.dumps(dataclasses.asdict(self._card)))

    def _gather(self, deadline: float) -> list[Host]:
        keys = [self._key(f"host/{place}") for place in range(self._card.hosts)]

        def all_here() -> bool:
            if (verdict := self.verdict()) is not None:
                raise PeerLost(f"the job at {self._where} has ended before it began: {verdict.failure.line}")
            return bool(self._ask(self._store.check, keys))

        self._await(all_here, deadline, self._too_few)
        return [self._read_card(key) for key in keys]

    def _read_card(self, key: str) -> Host:
        try:
            return Host.from_json(self._ask(self._store.get, key))
        except (ValueError, KeyError, TypeError):
            raise PeerLost(f"something that is not a launcher of this job writes to {self._where}") from None

    def _open_rank_store(self, deadline: float) -> tuple[str, int]:
        key, first = self._key("rank-store"), self.hosts[0]
        if self.node_rank == 0:
            listener = network.listen(first.address, 0)
            port = int(listener.getsockname()[1])
            self._rank_store = TCPStore(
                first.address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            self._ask(self._store.set, key, str(port))
        self._await(lambda: self._ask(self._store.check, [key]), deadline, self._too_few)
        return first.address, int(self._ask(self._store.get, key))

    def _await(self, ready: Callable[[], T], deadline: float, missed: Callable[[], PeerLost]) -> Any:
        """Poll rather than block in the store: a signal must be heeded at once."""
        while not (answer := ready()):
            if time.monotonic() > deadline:
                raise missed()
            time.sleep(POLL)
        return answer

    def _too_few(self) -> PeerLost:
        keys = [self._key(f"host/{place}") for place in range(self._card.hosts)]
        names = [self._read_card(key).name for key in keys if self._ask(self._store.check, [key])]
        return PeerLost(
            f"{len(names)} of {self._card.hosts} hosts came to {self._where} within {self._join_timeout:g} s "
            f"({', '.join(names)}); start the same command on the others, or give --join-timeout"
        )

    def _too_many(self) -> PeerLost:
        return PeerLost(
            f"the job at {self._where} has all its {self._card.hosts} hosts already and did not need this one within "
            f"{self._join_timeout:g} s; for another job choose another port"
        )

    def _key(self, name: str) -> str:
        return f"round-{self.round}/{name}"

    def _ask(self, call: Callable[..., T], *args: object) -> T:
        try:
            return call(*args)
        except RuntimeError:  # torch's network and store errors alike
            raise PeerLost(f"the launcher at {self._where} does not answer any more; look at its console") from None


def _read_verdict(text: bytes) -> Verdict:
    try:
        given = json.loads(text)
        return Verdict(Failure.from_json(given["failure"]), bool(given["again"]))
    except (ValueError, KeyError, TypeError):
        raise PeerLost("something that is not a launcher of this job writes to its store") from None
