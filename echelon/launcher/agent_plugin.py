"""What a launcher keeps beside its ranks: copies of their state, the stall watch. The agent calls each in turn."""

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
    """One attempt of the job: which hosts take part, and where they read what the others say."""

    #: restarts and changes of the hosts so far
    number: int
    node_rank: int
    #: in order; ``host.endpoints`` has one entry for each of its ranks
    hosts: tuple[RendezvousHost, ...]
    #: what launchers write for one another in this round. Calls may raise RuntimeError when the serving host is gone
    board: Store
    #: address and port by which ranks, and their launcher, reach the store of the ranks from this host
    rank_store: tuple[str, int]
    log_dir: Path

    @property
    def world_size(self) -> int:
        return sum(len(host.endpoints) for host in self.hosts)

    @property
    def first_rank(self) -> int:
        """The smallest rank on this host."""
        return sum(len(host.endpoints) for host in self.hosts[: self.node_rank])


class AgentPlugin(Protocol):
    """Lives as long as the launcher; a round is announced before its ranks start and ended after they have."""

    @property
    def card(self) -> Mapping[str, str]:
        """What the launchers of the other hosts must know of this one (``RendezvousHost.extras``)."""
        ...

    def environment(self, at: Round) -> Mapping[str, str]:
        """What every rank of this host finds in its environment in this round."""
        ...

    def begin(self, at: Round, pids: Mapping[int, int]) -> None:
        """The ranks of this host run: process ids by rank."""
        ...

    def look(self) -> Failure | None:
        """Asked about twice a second while they run. A failure ends the round, as a rank's own would."""
        ...

    def end(self) -> None:
        """The ranks of the round are gone."""
        ...

    def close(self) -> None: ...
