"""What ranks tell one another before they have joined torch.distributed: JSON in the store of the launcher."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.base.environment import RESTART_COUNT, RankInfo
from echelon.base.errors import PeerLost


class MessageStore:
    """Keys are written once. Every wait is bounded."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float) -> Any:
        """What is there, or comes within ``seconds``; ``None`` when nothing does.

        It asks again and again: the store's own wait writes pages to stderr when nothing comes.
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
        """As ``get``, for what comes at once: without a pause, so that the way there and back can be timed."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return json.loads(self._store.get(key))
        except (DistError, RuntimeError):
            return None

    def gather(self, kind: str, who: Iterable[int], seconds: float) -> dict[int, Any]:
        """``kind/N`` of all that came within ``seconds``."""
        deadline = time.monotonic() + seconds
        found = {number: self.get(f"{kind}/{number}", deadline - time.monotonic()) for number in who}
        return {number: value for number, value in found.items() if value is not None}


def open_message_store(place: RankInfo, seconds: float, attempt: str) -> MessageStore:
    """At the launcher's store, where every rank of the job finds it."""
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
