"""Data of the doctor's report: the details of a job, and the findings derived from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from echelon.base.network import Nic
from echelon.tools.doctor.host_details import FAILED, Details
from echelon.tools.doctor.nics import GLOO, NCCL, HostNics, NicChoice


@dataclass
class DoctorReport:
    """The details of a job. Hosts are keyed by node rank, ranks by their global rank."""

    world_size: int
    checkpoint: str | None
    quick: bool
    #: address (and interface) of the first host's store, as text
    store: str = ""
    hosts: dict[int, Details] = field(default_factory=dict)
    ranks: dict[int, Details] = field(default_factory=dict)
    #: by source host, target host and interface of the target: '' if reached, or the reason for failure
    knocks: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)
    #: all-reduce measurements over all ranks; or the reason why they ``failed`` or were ``left_out``
    together: Details = field(default_factory=dict)
    pairs: list[Details] = field(default_factory=list)
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

    def name(self, node: int) -> str:
        """Return the host's name, followed by its node rank if several hosts have the same name."""
        if node not in self.hosts:
            return f"number {node}"
        name = name_of(self.hosts[node])
        alike = [other for other in self.hosts if name_of(self.hosts[other]) == name]
        return name if len(alike) == 1 else f"{name}#{node}"

    def ranks_of(self, node: int) -> list[int]:
        return sorted(rank for rank, details in self.ranks.items() if details["node"] == node)

    @property
    def missing_ranks(self) -> list[int]:
        return sorted(set(range(self.world_size)) - set(self.ranks))

    @property
    def used(self) -> list[str]:
        """The interface variables of the libraries that the job uses: Gloo always, NCCL if all ranks have a GPU."""
        on_gpu = self.ranks and all(details.get("device", "CPU") != "CPU" for details in self.ranks.values())
        return [GLOO, NCCL] if on_gpu else [GLOO]

    def nics_by_host(self) -> dict[int, HostNics]:
        result = {node: host_nics(details) for node, details in self.hosts.items()}
        return {node: HostNics(self.name(node), one.nics, one.choices) for node, one in result.items()}

    def part(self, name: str) -> Iterator[tuple[int, Details]]:
        """Yield one named part of each host's details, for the hosts whose check did not fail."""
        for node, host in self.hosts.items():
            details: Any = host.get(name)
            if details and FAILED not in details:
                yield node, details

    def between(self) -> dict[tuple[int, int], Details]:
        """Return the measured pairs of ranks on different hosts."""
        return {pair: row for pair, row in self._pairs() if self._node(pair[0]) != self._node(pair[1])}

    def within(self) -> dict[tuple[int, int], Details]:
        return {pair: row for pair, row in self._pairs() if self._node(pair[0]) == self._node(pair[1])}

    def _pairs(self) -> Iterator[tuple[tuple[int, int], Details]]:
        return (((row["ranks"][0], row["ranks"][1]), row) for row in self.pairs)

    def _node(self, rank: int) -> int:
        return int(self.ranks[rank]["node"])


def host_nics(host: Details) -> HostNics:
    """Return the network interfaces of a host from its details."""
    result = host["network"]
    return HostNics(
        name_of(host),
        [Nic(**nic) for nic in result.get("nics", [])],
        [NicChoice(**choice) for choice in result.get("choices", [])],
    )


def name_of(host: Details) -> str:
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
