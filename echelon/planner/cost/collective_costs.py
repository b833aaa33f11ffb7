"""Durations of collectives: rings and trees by latency and bandwidth, or interpolated from measured tables.

A collective takes its tree latency or its bytes over the bandwidth, whichever is longer, because libraries switch from
trees to rings where the two are equal. A group that crosses hosts runs its ring through all of them: transfers inside a
host and between hosts run at the same time, so the slower of the two counts.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from echelon.planner.cluster.cluster import Curve, Link


@dataclass(frozen=True)
class CommGroup:
    """The ranks of a collective and the links between them.

    hosts:   number of hosts of the group, with equally many ranks on each
    sharing: number of such groups that use one host's network at the same time
    """

    ranks: int
    inside: Link
    network: Link
    hosts: int = 1
    sharing: int = 1

    @property
    def on_host(self) -> int:
        return max(1, self.ranks // self.hosts)

    @property
    def skew(self) -> float:
        return (self.inside if self.hosts == 1 else self.network).skew if self.ranks > 1 else 0.0

    @property
    def between(self) -> float:
        """Bytes/s between hosts for one such group: its share of the bandwidth, limited by the ports of its ranks."""
        own_ports = self.network.bandwidth * self.on_host / self.network.rails
        return min(self.network.bandwidth / self.sharing, own_ports)


#: By kind: number of times the tensor goes around the ring; one time has ``ranks - 1`` rounds.
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather_small": 1, "p2p": 1}


def seconds(kind: str, size: float, group: CommGroup) -> float:
    """Return the seconds of one collective on a tensor of ``size`` bytes."""
    if group.ranks == 1 or size <= 0:
        return 0.0
    if group.hosts == 1:
        return _on_link(kind, size, group.ranks, group.inside, group.inside.bandwidth)
    if group.on_host == 1:
        return _on_link(kind, size, group.hosts, group.network, group.between)
    inside = _on_link(kind, size, group.on_host, group.inside, group.inside.bandwidth)
    between = _on_link(kind, size, group.hosts, group.network, group.between)
    return max(inside, between + _latency(kind, group.on_host, group.inside))


def send_seconds(size: float, link: Link, bandwidth: float | None = None) -> float:
    """Return the seconds to send ``size`` bytes from one rank to another; ``bandwidth`` defaults to the link's."""
    measured = _measured("p2p", size * link.bandwidth / (bandwidth or link.bandwidth), 2, link)
    if measured is not None:
        return measured
    return link.latency + size / (bandwidth or link.bandwidth)


def _on_link(kind: str, size: float, ranks: int, link: Link, bandwidth: float) -> float:
    """Return the seconds of a collective among ranks that are connected by one link, with ``bandwidth`` for each."""
    measured = _measured(kind, size * link.bandwidth / bandwidth, ranks, link)
    if measured is not None:
        return measured
    return max(_latency(kind, ranks, link), _volume(kind, ranks) * size / bandwidth)


def _volume(kind: str, ranks: int) -> float:
    """Return the bytes that each rank sends, as a fraction of the tensor."""
    return ROUNDS[kind] * (ranks - 1) / ranks


def _latency(kind: str, ranks: int, link: Link) -> float:
    """Return the latency of a tree, which small messages use; large messages use a ring, whose rounds overlap."""
    return ROUNDS[kind] * link.latency * math.log2(ranks)


def _measured(kind: str, size: float, ranks: int, link: Link) -> float | None:
    """Return the seconds from the table for ``ranks`` ranks, or None without a table of this kind.

    Without a table for exactly ``ranks`` ranks, the one for the nearest number is scaled by the ratio of the formulas.
    """
    tables = {there: curve for (name, there), curve in link.tables.items() if name == kind and there > 1}
    if not tables:
        return None
    nearest = min(tables, key=lambda there: abs(math.log(there / ranks)))
    formula = Link(link.name, link.bandwidth, link.latency)
    scale = _on_link(kind, size, ranks, formula, link.bandwidth) / _on_link(
        kind, size, nearest, formula, link.bandwidth
    )
    return _read_times(tables[nearest], size) * scale


def _read_times(curve: Curve, size: float) -> float:
    """Return the seconds for ``size`` bytes.

    The time is linear between points, constant below the first one, and proportional to ``size`` above the last one.
    """
    place = bisect.bisect_left(curve, (size,))
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    (low, before), (high, after) = curve[place - 1], curve[place]
    return before + (size - low) / (high - low) * (after - before)
