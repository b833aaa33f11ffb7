"""``SnapshotHosts``: the snapshot servers of the job's hosts, as this rank's environment describes them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from echelon.base.environment import COPIES, MEMORY, whole_number
from echelon.base.job_secret import find_token
from echelon.checkpoint.in_memory.snapshot_wire import SnapshotClient

_engines = itertools.count()


@dataclass(frozen=True)
class SnapshotHosts:
    """The snapshot servers of one rendezvous round.

    hosts:   address and key of each host's server; without a key the job's token is used
    ranks:   number of ranks of each host, in order
    pid:     process on this host that owns the snapshot memory
    every:   number of steps between snapshots
    engine:  index of the engine in this process; each engine has its own snapshots
    """

    round: int
    here: int
    hosts: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    pid: int
    every: int
    engine: int = 0

    @staticmethod
    def for_next_engine() -> SnapshotHosts | None:
        """Return the hosts with the next engine index. All ranks create engines in the same order."""
        where = SnapshotHosts.find()
        return None if where is None else replace(where, engine=next(_engines))

    @staticmethod
    def find(env: Mapping[str, str] | None = None) -> SnapshotHosts | None:
        """Read the launcher's variables; return ``None`` if the job keeps no snapshots."""
        env = os.environ if env is None else env
        every = whole_number(env, COPIES, 0)
        if not env.get(MEMORY) or every < 1:
            return None
        said = json.loads(env[MEMORY])
        hosts = tuple((str(address), str(key)) for address, key in said["hosts"])
        return SnapshotHosts(
            int(said["round"]), int(said["here"]), hosts, tuple(said["ranks"]), int(said["pid"]), every
        )

    def host_of(self, rank: int) -> int:
        for host, count in enumerate(self.ranks):
            if rank < count:
                return host
            rank -= count
        raise AssertionError(f"there is no rank {rank}")

    @property
    def neighbour(self) -> int | None:
        """The host that replicates what only this host holds; ``None`` if there is no other."""
        return (self.here + 1) % len(self.hosts) if len(self.hosts) > 1 else None

    def call(self, host: int) -> SnapshotClient:
        address, key = self.hosts[host]
        return SnapshotClient(address, key.encode() if key else find_token())
