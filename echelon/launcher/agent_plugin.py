"""``AgentPlugin``: services that a launcher runs beside its ranks, such as in-memory snapshots and stall detection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from echelon.launcher.failure import Failure
    from echelon.launcher.rendezvous.messages import RendezvousHost


@dataclass(frozen=True)
class Round:
    """One attempt of the job: its hosts, and the stores that they use."""

    #: restarts and host changes so far
    number: int
    node_rank: int
    #: in order; ``host.endpoints`` has one entry per rank
    hosts: tuple[RendezvousHost, ...]
    #: store for messages between launchers in this round. Calls may raise RuntimeError if the serving host is lost
    store: Store
    #: address and port at which ranks, and their launcher, reach the ranks' store from this host
    rank_store: tuple[str, int]
    log_dir: Path

    @property
    def world_size(self) -> int:
        return sum(len(host.endpoints) for host in self.hosts)


class AgentPlugin(Protocol):
    """Lives as long as the launcher. A round calls ``environment`` before its ranks start, ``end`` after they end."""

    @property
    def announcement(self) -> Mapping[str, str]:
        """The values that launchers of other hosts need from this one (``RendezvousHost.extras``)."""
        ...

    def environment(self, at: Round) -> Mapping[str, str]:
        """Return environment variables for every rank of this host in this round."""
        ...

    def begin(self, at: Round, pids: Mapping[int, int]) -> None:
        """Start a round, after the ranks of this host have started; ``pids`` has process ids by rank."""
        ...

    def poll(self) -> Failure | None:
        """Check the ranks; called about twice a second while they run. A failure ends the round like a rank's own."""
        ...

    def end(self) -> None:
        """End a round, after its ranks have ended."""
        ...

    def close(self) -> None: ...
