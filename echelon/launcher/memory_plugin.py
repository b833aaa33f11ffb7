"""``MemoryCheckpointPlugin``: runs the snapshot server in the launcher, so that snapshots outlive the ranks."""

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

_ADDRESS, _KEY = "memory", "memory_key"  # keys of ``RendezvousHost.extras``


class MemoryCheckpointPlugin:
    """A plugin of the launcher. Ranks copy their state to its snapshot server after every ``copies`` steps.

    ``address`` is this host's, as seen by the other hosts. Without a ``token`` of the job the server makes its own key,
    which it gives to the job's ranks only, so that other users of the host have no access.
    """

    def __init__(self, address: str, token: bytes | None, copies: int) -> None:
        self._own_key = "" if token else secrets.token_hex(16)
        self._copies = copies
        self.server = SnapshotServer(address, token or self._own_key.encode())

    @property
    def announcement(self) -> Mapping[str, str]:
        return {_ADDRESS: self.server.address} | ({_KEY: self._own_key} if self._own_key else {})

    def environment(self, at: Round) -> Mapping[str, str]:
        """Return the variables for ranks; none if any host of the job keeps no snapshots."""
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

    def poll(self) -> Failure | None:
        return None

    def end(self) -> None:
        pass

    def close(self) -> None:
        self.server.close()


def describe(
    round_number: int, here: int, hosts: list[tuple[str, str]], ranks: list[int], copies: int
) -> dict[str, str]:
    """Return the variables from which a rank of this host reads the snapshot servers (see ``SnapshotHosts``)."""
    where = {"round": round_number, "here": here, "hosts": hosts, "ranks": ranks, "pid": os.getpid()}
    return {MEMORY: json.dumps(where), COPIES: str(copies)}
