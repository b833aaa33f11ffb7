"""``MemoryCheckpointPlugin``: what a launcher runs so that its ranks' copies outlive them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from echelon.base.environment import COPIES, MEMORY
from echelon.checkpoint.in_memory.snapshot_server import SnapshotServer

if TYPE_CHECKING:
    from echelon.launcher.agent_plugin import Round
    from echelon.launcher.failure import Failure

_ADDRESS, _KEY = "memory", "memory_key"  # on the card


class MemoryCheckpointPlugin:
    """A companion of the launcher. Ranks copy their state here after every ``copies`` steps.

    ``address`` is this host's, as the other hosts see it. Without a ``token`` of the job the memory asks for one of its
    own, which it tells its ranks, so that other users of the host are kept out.
    """

    def __init__(self, address: str, token: bytes | None, copies: int) -> None:
        self._own_key = "" if token else secrets.token_hex(16)
        self._copies = copies
        self.server = SnapshotServer(address, token or self._own_key.encode())

    @property
    def card(self) -> Mapping[str, str]:
        return {_ADDRESS: self.server.address} | ({_KEY: self._own_key} if self._own_key else {})

    def environment(self, at: Round) -> Mapping[str, str]:
        """Nothing where a host of the job keeps no copies."""
        if any(_ADDRESS not in host.extras for host in at.hosts):
            return {}
        return describe(
            round_number=at.number,
            here=at.node_rank,
            hosts=[(host.extras[_ADDRESS], host.extras.get(_KEY, "")) for host in at.hosts],
            ranks=[len(host.endpoints) for host in at.hosts],
            copies=self._copies,
        )

    def begin(self, at: Round, pids: Mapping[int, int]) -> None:
        pass

    def look(self) -> Failure | None:
        return None

    def end(self) -> None:
        pass

    def close(self) -> None:
        self.server.close()


def describe(
    round_number: int, here: int, hosts: list[tuple[str, str]], ranks: list[int], copies: int
) -> dict[str, str]:
    """The environment from which a rank of this process's host knows where to copy to (see ``Where``)."""
    where = {"round": round_number, "here": here, "hosts": hosts, "ranks": ranks, "pid": os.getpid()}
    return {MEMORY: json.dumps(where), COPIES: str(copies)}
