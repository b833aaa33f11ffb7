"""Enumeration of candidate meshes: sizes of the axes, and the placement of devices.

Equal devices form a pool. On one pool, a mesh is three numbers. On several pools, each replica may lie within a pool
(with batch shares by speed), or each stage may (the first stages on the devices with the largest memory, because a
pipeline's first stages hold the most micro-batches), or every split may span all pools (with widths by speed).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from echelon.planner.cluster.cluster import Cluster, Device
from echelon.planner.plan_search.stage_partition import divides_evenly

LARGEST_ORDER = 4096  # largest number of devices for which orders of ranks are listed explicitly


@dataclass(frozen=True)
class DevicePool:
    """Equal devices: their ranks, and the number of them on one host."""

    device: Device
    ranks: Sequence[int] = field(repr=False)
    in_host: int

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class CandidateMesh:
    """A mesh with the devices on its axes.

    replicate, stage, split: sizes of the axes
    stages:   device at each coordinate of the stage axis (of replica 0)
    replicas: numbers of replicas by device, first to last
    parts:    device at each coordinate of a split that spans several kinds; () if all are equal
    order:    ranks in order of the mesh's coordinates; () if they are consecutive
    """

    replicate: int
    stage: int
    split: int
    stages: tuple[Device, ...] = field(repr=False)
    replicas: tuple[tuple[int, Device], ...] = field(repr=False)
    parts: tuple[Device, ...] = field(default=(), repr=False)
    order: tuple[int, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        return self.replicate * self.stage * self.split

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the devices along the stage axis."""
        return tuple(device.name for device in self.stages)

    @functools.cached_property
    def kinds(self) -> tuple[tuple[int, Device], ...]:
        """Numbers of stages by device; a long pipeline has many stages and few kinds."""
        devices, counts = {device.name: device for device in self.stages}, Counter(self.names)
        return tuple((count, devices[name]) for name, count in counts.items())

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """A hashable key that is equal for equal meshes."""
        replicas = tuple((count, device.name) for count, device in self.replicas)
        parts = tuple(device.name for device in self.parts)
        return (self.replicate, self.stage, self.split, self.order, self.names, replicas, parts)


def find_pools(cluster: Cluster, devices: int | None = None) -> list[DevicePool]:
    """Return the pools of the first ``devices`` devices of a cluster; default: of all."""
    found: list[DevicePool] = []
    first, left = 0, cluster.size if devices is None else min(devices, cluster.size)
    for count, host in cluster.hosts:
        size = len(host.devices)
        for device, places in _alike(host.devices):
            ranks = _ranks(first, count, size, places, left)
            if ranks:
                found.append(DevicePool(device, ranks, min(len(places), len(ranks))))
        first, left = first + count * size, max(0, left - count * size)
    return found


def _alike(devices: Sequence[Device]) -> Iterator[tuple[Device, list[int]]]:
    names = [device.name for device in devices]
    for name in dict.fromkeys(names):
        places = [place for place, other in enumerate(names) if other == name]
        yield devices[places[0]], places


def _ranks(first: int, hosts: int, size: int, places: list[int], left: int) -> Sequence[int]:
    if len(places) == size:
        return range(first, first + min(hosts * size, left))
    within = (host * size + place for host in range(hosts) for place in places)
    return tuple(first + place for place in within if place < left)


@dataclass(frozen=True)
class MeshBounds:
    """The limits of the axes.

    units:       number of units of the model
    layers:      number of units of the most common kind, which stages divide evenly
    splits:      largest size of the split axis
    batch:       samples of the global batch
    beyond_host: True to include splits over several hosts
    fixed:       sizes of axes that are given
    size:        given size of the whole mesh: every device is then in the mesh, even if it gets no samples
    """

    units: int
    layers: int
    splits: int
    batch: int
    beyond_host: bool = False
    fixed: Mapping[str, int] = field(default_factory=dict)
    size: int | None = None

    def given(self, axis: str, most: int) -> list[int] | None:
        """Return the given size of the axis in a list, [] if it is above ``most``, or None if it is not given."""
        return None if axis not in self.fixed else [self.fixed[axis]] if self.fixed[axis] <= most else []


def find_meshes(pools: Sequence[DevicePool], bounds: MeshBounds) -> Iterator[CandidateMesh]:
    """Yield all candidate meshes, each once."""
    found = itertools.chain(_of_one_pool(pools[0], bounds), _of_several(pools, bounds) if len(pools) > 1 else ())
    # A job's ranks are numbered from 0 without gaps, so only the last devices can stay idle.
    usable = (
        mesh for mesh in found if (not mesh.order or max(mesh.order) < mesh.size) and bounds.size in (None, mesh.size)
    )
    return iter({mesh.key: mesh for mesh in usable}.values())


def _of_one_pool(pool: DevicePool, bounds: MeshBounds) -> Iterator[CandidateMesh]:
    for split in _splits(pool.in_host, len(pool), bounds):
        for stage in _stages(len(pool) // split, bounds):
            for replicate in _replicates(len(pool) // (split * stage), bounds):
                order = () if isinstance(pool.ranks, range) else _listed(pool.ranks[: replicate * stage * split])
                stages, replicas = (pool.device,) * stage, ((replicate, pool.device),)
                yield CandidateMesh(replicate, stage, split, stages=stages, replicas=replicas, order=order)


def _splits(in_host: int, most: int, bounds: MeshBounds) -> list[int]:
    """Return sizes of the split axis.

    Ranks of a split are adjacent, so a split whose size divides the number of a host's devices never crosses hosts.
    """
    most = min(most, bounds.splits)
    if (given := bounds.given("split", most)) is not None:
        return given
    within = [split for split in range(1, min(in_host, most) + 1) if in_host % split == 0]
    beyond = [in_host * times for times in (2, 4, 8)] if bounds.beyond_host else []
    return within + [split for split in beyond if split <= most]


def _stages(most: int, bounds: MeshBounds) -> list[int]:
    """Return the numbers of stages that are better than one stage less, assuming equal layers or equal units."""
    most = min(most, bounds.units)
    if (given := bounds.given("stage", most)) is not None:
        return given
    if bounds.units <= 16:
        return list(range(1, most + 1))
    return [
        stage
        for stage in range(1, most + 1)
        if divides_evenly(bounds.layers, stage) or divides_evenly(bounds.units, stage)
    ]


def _replicates(most: int, bounds: MeshBounds) -> list[int]:
    """Return numbers of replicas: the largest possible, and repeated halves of it.

    Among numbers with the same largest share, the smallest is taken. With very many devices, only one halving is tried,
    because there is no reason to leave most of them idle.
    """
    if (given := bounds.given("replicate", most)) is not None:
        return given
    if bounds.size is not None:
        return [most]
    most = min(most, bounds.batch)
    halves = (most >> times for times in range(min(most.bit_length(), 8 if most <= 64 else 2)))
    return list(dict.fromkeys(fewest(count, bounds.batch) for count in halves))


def fewest(parts: int, total: int) -> int:
    """Return the smallest number of parts of ``total`` whose largest part is as large as with ``parts`` parts."""
    return math.ceil(total / math.ceil(total / parts))


# ---- devices of several kinds ----


def _of_several(pools: Sequence[DevicePool], bounds: MeshBounds) -> Iterator[CandidateMesh]:
    size = sum(map(len, pools))
    yield from _replicas_within_pools(pools, bounds)
    if size <= LARGEST_ORDER:
        for order in _orders(pools):
            yield from _stages_within_pools(order, bounds)
        yield from _splits_over_pools(pools, bounds)


def _replicas_within_pools(pools: Sequence[DevicePool], bounds: MeshBounds) -> Iterator[CandidateMesh]:
    for split in _splits(math.gcd(*(pool.in_host for pool in pools)), min(map(len, pools)), bounds):
        for stage in _stages(min(map(len, pools)) // split, bounds):
            counts = [len(pool) // (stage * split) for pool in pools]
            if sum(counts) in (bounds.given("replicate", bounds.batch) or range(1, bounds.batch + 1)):
                taken = list(zip(counts, pools, strict=True))
                replicas = tuple((count, pool.device) for count, pool in taken)
                order = _listed(rank for count, pool in taken for rank in pool.ranks[: count * stage * split])
                weakest = min((pool.device for pool in pools), key=lambda device: device.memory)
                yield CandidateMesh(sum(counts), stage, split, (weakest,) * stage, replicas, order=order)


def _orders(pools: Sequence[DevicePool]) -> list[tuple[DevicePool, ...]]:
    """Return orders of the pools along a pipeline: the largest memory first, and all others for up to three pools."""
    by_memory = tuple(sorted(pools, key=lambda pool: -pool.device.memory))
    others = itertools.permutations(pools) if len(pools) <= 3 else ()
    return list(dict.fromkeys([by_memory, *others]))


def _stages_within_pools(pools: Sequence[DevicePool], bounds: MeshBounds) -> Iterator[CandidateMesh]:
    for split in _splits(math.gcd(*(pool.in_host for pool in pools)), min(map(len, pools)), bounds):
        most = min(bounds.batch, min(map(len, pools)) // split)
        for replicate in bounds.given("replicate", most) or range(1, most + 1):
            counts = [len(pool) // (replicate * split) for pool in pools]
            if sum(counts) in (bounds.given("stage", bounds.units) or range(1, bounds.units + 1)):
                stages = [pool.device for count, pool in zip(counts, pools, strict=True) for _ in range(count)]
                order = _by_stages(pools, counts, replicate, split)
                replicas = ((replicate, stages[0]),)
                yield CandidateMesh(replicate, sum(counts), split, tuple(stages), replicas, order=order)


def _by_stages(pools: Sequence[DevicePool], counts: Sequence[int], replicate: int, split: int) -> tuple[int, ...]:
    """Return the ranks by (replica, stage, part); each stage takes the next ``replicate x split`` ranks of its pool."""
    along = [(pool, at) for pool, count in zip(pools, counts, strict=True) for at in range(count)]
    places = itertools.product(range(replicate), along, range(split))
    return _listed(pool.ranks[(at * replicate + replica) * split + part] for replica, (pool, at), part in places)


def _splits_over_pools(pools: Sequence[DevicePool], bounds: MeshBounds) -> Iterator[CandidateMesh]:
    """Yield meshes whose splits span all pools, with the same number of devices of each pool in every split."""
    most = math.gcd(*map(len, pools))
    for groups in (count for count in range(1, most + 1) if most % count == 0):
        mixture = [len(pool) // groups for pool in pools]
        split = sum(mixture)
        if split not in (bounds.given("split", bounds.splits) or range(2, min(bounds.splits, 16) + 1)):
            continue
        order = _listed(
            rank
            for group in range(groups)
            for pool, count in zip(pools, mixture, strict=True)
            for rank in pool.ranks[group * count : (group + 1) * count]
        )
        parts = tuple(pool.device for pool, count in zip(pools, mixture, strict=True) for _ in range(count))
        slowest = min(parts, key=lambda device: max(device.peak.values()))
        for stage in _stages(groups, bounds):
            if groups % stage == 0 and groups // stage in (
                bounds.given("replicate", groups) or range(bounds.batch + 1)
            ):
                replicas = ((groups // stage, slowest),)
                yield CandidateMesh(groups // stage, stage, split, (slowest,) * stage, replicas, parts, order)


def _listed(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks as a tuple, or () if they are 0, 1, 2, ..."""
    order = tuple(ranks)
    return () if order == tuple(range(len(order))) else order


# ---- micro-batches ----


def find_micro_batches(samples: int) -> list[int]:
    """Return the numbers of micro-batches to try for a replica's samples.

    The sizes are divisors of ``samples`` and, if there are few, also round numbers. Among numbers with the same largest
    micro-batch, the smallest is taken.
    """
    sizes = {size for size in range(1, min(samples, 4096) + 1) if samples % size == 0}
    if len(sizes) > 16:
        sizes = {size for size in sizes if _is_round(size)} | {samples}
    if len(sizes) < 6:
        sizes |= {size for size in range(1, samples) if _is_round(size)}
    return sorted({fewest(math.ceil(samples / size), samples) for size in {*sizes, samples}})


def _is_round(number: int) -> bool:
    """Return True for powers of two and three times powers of two."""
    odd = number >> ((number & -number).bit_length() - 1)
    return odd in (1, 3)


def commonest(units: Sequence[object]) -> int:
    """Return the number of units of the most common kind; equal units are one object."""
    return max(Counter(map(id, units)).values())
