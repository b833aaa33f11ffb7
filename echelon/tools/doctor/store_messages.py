"""Messages between ranks before they join torch.distributed, and the clock offset between hosts measured by them.

Messages are JSON values in the launcher's store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.base.environment import RESTART_COUNT, RankInfo
from echelon.base.errors import PeerLost
from echelon.tools.doctor.host_details import Details

#: Round trips for one clock offset; seconds to wait for one message of it.
_ROUNDS, _PATIENCE = 6, 10.0


class MessageStore:
    """JSON messages in a store. Keys are written once, and every wait has a limit."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float) -> Any:
        """Return the value of ``key``; ``None`` if it does not arrive within ``seconds``.

        This method polls, because the store's own wait writes long messages to stderr when it times out.
        """
        deadline, pause = time.monotonic() + seconds, 0.005
        try:
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(pause)
                pause = min(0.1, pause * 1.5)
            return json.loads(self._store.get(key))
        except (DistError, RuntimeError):
            return None

    def soon(self, key: str, seconds: float) -> Any:
        """Return the value of ``key`` as ``get`` does, but without pauses, so that a round trip can be timed."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return json.loads(self._store.get(key))
        except (DistError, RuntimeError):
            return None

    def gather(self, kind: str, who: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return the values of ``kind/N``, for each N of ``who``, that arrive within ``seconds``."""
        deadline = time.monotonic() + seconds
        result = {number: self.get(f"{kind}/{number}", deadline - time.monotonic()) for number in who}
        return {number: value for number, value in result.items() if value is not None}


def open_message_store(place: RankInfo, seconds: float, attempt: str) -> MessageStore:
    """Connect to the launcher's store, which all ranks of the job share. Raises ``PeerLost`` after ``seconds``."""
    if place.world_size == 1:
        return MessageStore(HashStore())
    try:
        store = TCPStore(
            place.master_addr,
            place.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
    except (DistError, RuntimeError):
        raise PeerLost(
            f"rank {place.rank} could not reach the first host's store at {place.master_addr}:{place.master_port} "
            f"within {seconds:g} s; is that address reachable from here, and no firewall in between?"
        ) from None
    return MessageStore(PrefixStore(f"{RESTART_COUNT}-{attempt}/doctor", store))


# Clock offset


def answer_clock_requests(messages: MessageStore, hosts: Iterable[int]) -> None:
    """Answer the time requests of all other hosts in turn, on the first host."""
    for host in hosts:
        for turn in range(_ROUNDS):
            hear = messages.soon if turn else messages.get
            if hear(f"clock/{host}/{turn}/question", _PATIENCE) is None:
                break
            messages.put(f"clock/{host}/{turn}/answer", time.time())


def measure_clock_offset(messages: MessageStore, host: int, patience: float) -> Details:
    """Return the seconds by which this host's clock is ``ahead`` of the first host's.

    The uncertainty ``within`` is half of the quickest round trip.
    """
    found: list[tuple[float, float]] = []
    for turn in range(_ROUNDS):
        start, since = time.time(), time.perf_counter()
        messages.put(f"clock/{host}/{turn}/question", True)
        remote_time = (
            messages.soon(f"clock/{host}/{turn}/answer", _PATIENCE)
            if turn
            else messages.get(f"clock/{host}/{turn}/answer", patience)
        )
        if remote_time is None:
            return {"failed": "the first host did not tell the time"}
        found.append(clock_offset(start, time.perf_counter() - since, float(remote_time)))
    within, ahead = min(found)
    return {"ahead": ahead, "within": within}


def clock_offset(sent_at: float, trip: float, remote_time: float) -> tuple[float, float]:
    """Return (uncertainty, seconds ahead): the answer was given at some time during the round trip."""
    return trip / 2, sent_at + trip / 2 - remote_time
