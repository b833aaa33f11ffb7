"""Placement of a mesh on a cluster: the devices that compute each stage, and the groups that cross hosts.

Ranks are placed as in base/mesh.py: split innermost, then stage, then replicate. For clusters with equal hosts the
placement is computed arithmetically, so that 100,000 devices cost no more than eight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import UsageError
from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Cluster, Device, Link
from echelon.planner.cost.collective_costs import CommGroup, seconds, send_seconds

Worker = tuple[Device, float]  #: a device of a split, and its width relative to an even split


@dataclass(frozen=True)
class ReplicaPlacement:
    """Replicas with equal devices and shares.

    workers: for each rank along the stage axis, the distinct devices of its split
    share:   share of the batch, relative to an even share
    """

    workers: tuple[tuple[Worker, ...], ...]
    share: float = 1.0


@dataclass(frozen=True)
class Edge:
    """The connection from one rank of the stage axis to the next.

    sharing: number of such edges that leave one host at the same time
    """

    link: Link
    sharing: int = 1

    def seconds(self, size: float) -> float:
        bandwidth = self.link.bandwidth / max(self.sharing, self.link.rails)
        return self.link.skew + send_seconds(size, self.link, bandwidth)


@dataclass(frozen=True)
class MeshPlacement:
    """The placement of a mesh on a cluster.

    edges: for each rank along the stage axis, the edge to the next rank; the last rank's edge leads to the first
    share: replicas that share training state; the same as ``replicate`` unless groups of replicas do (HSDP)
    across: replicas with the same place in each of these groups; None if there is one group
    """

    replicas: tuple[ReplicaPlacement, ...]
    split: CommGroup
    replicate: CommGroup
    edges: tuple[Edge, ...]
    share: CommGroup
    across: CommGroup | None = None

    def edge_seconds(self, rank: int, size: float, scattered: bool, gathered: bool = True) -> float:
        """Return the seconds to send ``size`` bytes from stage rank ``rank`` to the next one.

        scattered: True if every rank of a split sends its part
        gathered:  True if the receivers all-gather the parts
        """
        if not scattered or self.split.ranks == 1:
            return self.edges[rank].seconds(size)
        gathering = seconds("all_gather", size, self.split) if gathered else 0.0
        return self.edges[rank].seconds(size / self.split.ranks) + gathering


def place(draft: Draft, cluster: Cluster) -> MeshPlacement:
    if draft.ranks > cluster.size:
        raise UsageError(f"a plan for {draft.ranks} devices cannot run on {cluster.size}: make its mesh smaller")
    return _by_arithmetic(draft, cluster) if cluster.uniform and not draft.order else _by_looking(draft, cluster)


# ---- equal hosts ----


def _by_arithmetic(draft: Draft, cluster: Cluster) -> MeshPlacement:
    host = cluster.hosts[0][1]
    here = len(host.devices)
    apart = draft.stage * draft.split  # rank distance of two neighbors along the replicate axis
    device = host.devices[0]
    widths = {round(width * draft.split / sum(draft.widths), 6) for width in draft.widths} or {1.0}
    workers = tuple((device, width) for width in sorted(widths))
    shares = {share * draft.replicate / sum(draft.shares) for share in draft.shares} or {1.0}
    replicas = tuple(ReplicaPlacement((workers,) * draft.stage, share) for share in sorted(shares))
    split = _strided_group(draft.split, 1, here, host.link, cluster.network, draft.ranks)
    replicate = _strided_group(draft.replicate, apart, here, host.link, cluster.network, draft.ranks)
    edges = tuple(
        _edge(rank * draft.split, (rank + 1) % draft.stage * draft.split, draft.split, here, host.link, cluster.network)
        for rank in range(draft.stage)
    )
    if not _has_groups(draft):
        return MeshPlacement(replicas, split, replicate, edges, share=replicate)
    share = _strided_group(draft.within, apart, here, host.link, cluster.network, draft.ranks)
    groups = draft.replicate // draft.within
    across = _strided_group(groups, draft.within * apart, here, host.link, cluster.network, draft.ranks)
    return MeshPlacement(replicas, split, replicate, edges, share, across)


def _has_groups(draft: Draft) -> bool:
    return bool(draft.shard) and 0 < draft.within < draft.replicate


def _strided_group(ranks: int, apart: int, here: int, inside: Link, network: Link, everyone: int) -> CommGroup:
    """Return a group of ``ranks`` ranks at distance ``apart``, on hosts of ``here`` devices.

    everyone: number of all ranks of the mesh
    """
    hosts = math.ceil(ranks * apart / here) if apart < here else ranks
    on_host = max(1, ranks // hosts)
    return CommGroup(ranks, inside, network, hosts, sharing=max(1, min(here, everyone) // on_host))


def _edge(source: int, target: int, split: int, here: int, inside: Link, network: Link) -> Edge:
    if source // here == (target + split - 1) // here and target // here == source // here:
        return Edge(inside)
    return Edge(network, sharing=min(split, here))


# ---- any cluster, any order ----


def _by_looking(draft: Draft, cluster: Cluster) -> MeshPlacement:
    sizes = (draft.replicate, draft.stage, draft.split)
    ranks = np.array(draft.order or range(draft.ranks)).reshape(sizes)
    devices = list(cluster.devices())
    hosts = _host_numbers(cluster)[ranks]
    inside = min((host.link for _, host in cluster.hosts), key=lambda link: link.bandwidth)
    replicate = _seen_group(hosts.reshape(draft.replicate, -1).T, inside, cluster.network, hosts)
    share, across = replicate, None
    if _has_groups(draft):
        grouped = hosts.reshape(-1, draft.within, draft.stage * draft.split)
        share = _seen_group(grouped.transpose(0, 2, 1).reshape(-1, draft.within), inside, cluster.network, hosts)
        across = _seen_group(grouped.reshape(len(grouped), -1).T, inside, cluster.network, hosts)
    return MeshPlacement(
        _distinct(draft, [[[devices[rank] for rank in split] for split in stage] for stage in ranks.tolist()]),
        _seen_group(hosts.reshape(-1, draft.split), inside, cluster.network, hosts),
        replicate,
        tuple(
            _seen_edge(hosts[:, rank], hosts[:, (rank + 1) % draft.stage], inside, cluster.network)
            for rank in range(draft.stage)
        ),
        share,
        across,
    )


def _host_numbers(cluster: Cluster) -> NDArray[np.int64]:
    sizes = [len(host.devices) for count, host in cluster.hosts for _ in range(count)]
    return np.repeat(np.arange(len(sizes)), sizes)


def _distinct(draft: Draft, devices: list[list[list[Device]]]) -> tuple[ReplicaPlacement, ...]:
    widths = [width * draft.split / sum(draft.widths) for width in draft.widths] or [1.0] * draft.split
    shares = [share * draft.replicate / sum(draft.shares) for share in draft.shares] or [1.0] * draft.replicate
    found: dict[object, ReplicaPlacement] = {}
    for replica, share in zip(devices, shares, strict=True):
        key = (tuple(tuple(device.name for device in split) for split in replica), round(share, 9))
        if key not in found:
            stages = (dict.fromkeys(zip(split, widths, strict=True)) for split in replica)
            found[key] = ReplicaPlacement(tuple(tuple(workers) for workers in stages), share)
    return tuple(found.values())


def _seen_group(groups: NDArray[np.int64], inside: Link, network: Link, everyone: NDArray[np.int64]) -> CommGroup:
    """Return the group that is on the most hosts."""
    hosts = max(len(np.unique(group)) for group in groups)
    on_host = max(1, groups.shape[1] // hosts)
    busiest = int(np.bincount(everyone.ravel()).max())
    return CommGroup(groups.shape[1], inside, network, hosts, sharing=max(1, busiest // on_host))


def _seen_edge(source: NDArray[np.int64], target: NDArray[np.int64], inside: Link, network: Link) -> Edge:
    """Return the edge of one stage rank; source and target are host indices of shape (replicate, split)."""
    leaving = source[source != target]
    return Edge(network, int(np.bincount(leaving).max())) if leaving.size else Edge(inside)
