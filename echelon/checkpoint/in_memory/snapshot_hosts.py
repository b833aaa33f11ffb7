"""``SnapshotHosts``: what a rank finds in its environment about the memories of the job's hosts."""

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
    """One round of the job, as its hosts' memories see it.

    hosts: address and key of each one's memory; without a key the job's token is asked for
    ranks: how many ranks each host has, in order
    pid:   the process on this host that owns its memory
    every: copy after every so many steps
    engine: which of the engines that this process makes; each has copies of its own
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
        """All ranks make their engines in the same order, and so do those that are started in their place."""
        where = SnapshotHosts.find()
        return None if where is None else replace(where, engine=next(_engines))

    @staticmethod
    def find(env: Mapping[str, str] | None = None) -> SnapshotHosts | None:
        """From the launcher's variables; ``None`` where no copies are kept."""
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
        """The host that keeps what only this one has; ``None`` where there is no other."""
        return (self.here + 1) % len(self.hosts) if len(self.hosts) > 1 else None

    def call(self, host: int) -> SnapshotClient:
        address, key = self.hosts[host]
        return SnapshotClient(address, key.encode() if key else find_token())
