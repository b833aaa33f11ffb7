"""Data of the doctor's report: the facts about a job, and the findings derived from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from echelon.base.network import Nic
from echelon.tools.doctor.facts import FAILED, Facts
from echelon.tools.doctor.nics import GLOO, NCCL, HostNics, NicChoice


@dataclass
class DoctorReport:
    """The facts about a job. Hosts are keyed by node rank, ranks by their global rank."""

    world_size: int
    checkpoint: str | None
    quick: bool
    #: address (and interface) of the first host's store, as text
    store: str = ""
    hosts: dict[int, Facts] = field(default_factory=dict)
    ranks: dict[int, Facts] = field(default_factory=dict)
    #: by source host, target host and interface of the target: '' if reached, or the reason for failure
    knocks: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)
    #: all-reduce measurements over all ranks; or the reason why they ``failed`` or were ``left_out``
    together: Facts = field(default_factory=dict)
    pairs: list[Facts] = field(default_factory=list)
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

    def name(self, node: int) -> str:
        """Return the host's name, followed by its node rank if several hosts have the same name."""
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
        """The interface variables of the libraries that the job uses: Gloo always, NCCL if all ranks have a GPU."""
        on_gpu = self.ranks and all(facts.get("device", "CPU") != "CPU" for facts in self.ranks.values())
        return [GLOO, NCCL] if on_gpu else [GLOO]

    def nics_by_host(self) -> dict[int, HostNics]:
        result = {node: host_nics(facts) for node, facts in self.hosts.items()}
        return {node: HostNics(self.name(node), one.nics, one.choices) for node, one in result.items()}

    def part(self, name: str) -> Iterator[tuple[int, Facts]]:
        """Yield one named part of each host's facts, for the hosts whose check did not fail."""
        for node, host in self.hosts.items():
            facts: Any = host.get(name)
            if facts and FAILED not in facts:
                yield node, facts

    def between(self) -> dict[tuple[int, int], Facts]:
        """Return the measured pairs of ranks on different hosts."""
        return {pair: row for pair, row in self._pairs() if self._node(pair[0]) != self._node(pair[1])}

    def within(self) -> dict[tuple[int, int], Facts]:
        return {pair: row for pair, row in self._pairs() if self._node(pair[0]) == self._node(pair[1])}

    def _pairs(self) -> Iterator[tuple[tuple[int, int], Facts]]:
        return (((row["ranks"][0], row["ranks"][1]), row) for row in self.pairs)

    def _node(self, rank: int) -> int:
        return int(self.ranks[rank]["node"])


def host_nics(host: Facts) -> HostNics:
    """Return the network interfaces of a host from its facts."""
    result = host["network"]
    return HostNics(
        name_of(host),
        [Nic(**nic) for nic in result.get("nics", [])],
        [NicChoice(**choice) for choice in result.get("choices", [])],
    )


def name_of(host: Facts) -> str:
    return str(host["system"].get("name", "?"))


@dataclass(frozen=True)
class DoctorFinding:
    sentence: str
    #: True: a job will fail or hang; False: a job may be slow, or fail later
    wrong: bool = False

    @property
    def mark(self) -> str:
        return "x" if self.wrong else "!"


def listed(words: list[str], most: int = 6) -> str:
    """Join words to a text such as ``a, b and 3 more``."""
    rest = len(words) - most
    return ", ".join(words) if rest <= 0 else f"{', '.join(words[:most])} and {rest} more"
