"""All that was found, from which the verdicts and the text are made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from echelon.tools.doctor.bounded_check import FAILED, Facts
from echelon.tools.doctor.host_facts import host_nics, name_of
from echelon.tools.doctor.wrong_nic import GLOO, NCCL, HostNics


@dataclass
class DoctorReport:
    """Hosts by their place in the job, ranks by their number."""

    world_size: int
    checkpoint: str | None
    quick: bool
    #: where the first host's store is, in words
    store: str = ""
    hosts: dict[int, Facts] = field(default_factory=dict)
    ranks: dict[int, Facts] = field(default_factory=dict)
    #: from which host to which, and there to which interface: '' for reached, or why not
    knocks: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)
    #: torch.distributed: what all ranks together reach; or that it ``failed``, or was ``left_out``, and why
    together: Facts = field(default_factory=dict)
    pairs: list[Facts] = field(default_factory=list)
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

    def name(self, node: int) -> str:
        """The host's name; with its place where two have the same."""
        if node not in self.hosts:
            return f"number {node}"
        name = name_of(self.hosts[node])
        alike = [other for other in self.hosts if name_of(self.hosts[other]) == name]
        return name if len(alike) == 1 else f"{name}#{node}"

    def ranks_of(self, node: int) -> list[int]:
        return sorted(rank for rank, facts in self.ranks.items() if facts["node"] == node)

    @property
    def missing_ranks(self) -> list[int]:
        return sorted(set(range(self.world_size)) - set(self.ranks))

    @property
    def used(self) -> list[str]:
        """The variables of the libraries that ranks will talk through: Gloo always, NCCL where all have a GPU."""
        on_gpu = self.ranks and all(facts.get("device", "CPU") != "CPU" for facts in self.ranks.values())
        return [GLOO, NCCL] if on_gpu else [GLOO]

    def nics_by_host(self) -> dict[int, HostNics]:
        found = {node: host_nics(facts) for node, facts in self.hosts.items()}
        return {node: HostNics(self.name(node), one.nics, one.choices) for node, one in found.items()}

    def part(self, name: str) -> Iterator[tuple[int, Facts]]:
        """That part of every host's facts that was found."""
        for node, host in self.hosts.items():
            facts: Any = host.get(name)
            if facts and FAILED not in facts:
                yield node, facts

    def between(self) -> dict[tuple[int, int], Facts]:
        """Pairs of ranks on different hosts."""
        return {pair: row for pair, row in self._pairs() if self._node(pair[0]) != self._node(pair[1])}

    def within(self) -> dict[tuple[int, int], Facts]:
        return {pair: row for pair, row in self._pairs() if self._node(pair[0]) == self._node(pair[1])}

    def _pairs(self) -> Iterator[tuple[tuple[int, int], Facts]]:
        return (((row["ranks"][0], row["ranks"][1]), row) for row in self.pairs)

    def _node(self, rank: int) -> int:
        return int(self.ranks[rank]["node"])
