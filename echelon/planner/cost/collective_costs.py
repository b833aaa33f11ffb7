"""How long ranks take to exchange bytes: rings and trees by latency and bandwidth, or measured where tables say.

A collective takes its latency or its bytes over the bandwidth, whichever is longer: libraries change over from one way
to the other where they meet. A group that crosses hosts runs its ring through all of them: what is inside a host and
what is between hosts go on at the same time, so that the slower of the two counts.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from echelon.planner.cluster.cluster import Curve, Link


@dataclass(frozen=True)
class CommGroup:
    """Ranks that exchange something.

    hosts:   on how many hosts they are, equally many on each
    sharing: how many such groups use one host's network at the same time
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
        """Bytes/s between hosts for one such group: its part of them, and no more than its ranks' own ports take."""
        own_ports = self.network.bandwidth * self.on_host / self.network.rails
        return min(self.network.bandwidth / self.sharing, own_ports)


#: By kind: how often the tensor goes around the ring, in rounds of one rank less than there are.
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather_small": 1, "p2p": 1}


def seconds(kind: str, size: float, group: CommGroup) -> float:
    """Of one collective on a tensor of ``size`` bytes."""
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
    """From one rank to another."""
    measured = _measured("p2p", size * link.bandwidth / (bandwidth or link.bandwidth), 2, link)
    if measured is not None:
        return measured
    return link.latency + size / (bandwidth or link.bandwidth)


def _on_link(kind: str, size: float, ranks: int, link: Link, bandwidth: float) -> float:
    """Among ranks of which each is as far from the others, each with ``bandwidth``."""
    measured = _measured(kind, size * link.bandwidth / bandwidth, ranks, link)
    if measured is not None:
        return measured
    return max(_latency(kind, ranks, link), _volume(kind, ranks) * size / bandwidth)


def _volume(kind: str, ranks: int) -> float:
    """What each rank sends, as a part of the tensor."""
    return ROUNDS[kind] * (ranks - 1) / ranks


def _latency(kind: str, ranks: int, link: Link) -> float:
    """Of a tree, along which small messages go; large ones go round a ring, whose rounds overlap."""
    return ROUNDS[kind] * link.latency * math.log2(ranks)


def _measured(kind: str, size: float, ranks: int, link: Link) -> float | None:
    """From the table of so many ranks, or of the nearest number of them, in proportion to what each rank sends."""
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
    """Seconds for ``size`` bytes: straight between points, as long as the smallest below, in proportion above."""
    place = bisect.bisect_left(curve, (size,))
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    (low, before), (high, after) = curve[place - 1], curve[place]
    return before + (size - low) / (high - low) * (after - before)
