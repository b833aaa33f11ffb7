"""Cluster: hosts, their devices, and the links inside and between hosts.

Every figure has an origin: measured, a default of the device's kind, or given by the user.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from echelon.base.errors import UsageError

Origin = Literal["measured", "default", "given"]

#: (size, value) pairs in ascending order of size, interpolated linearly over the logarithm of the size
Curve = tuple[tuple[float, float], ...]

#: The dtype whose peak applies to a device that has no peak for a dtype of its own.
FALLBACK = {"tf32": "float32", "float8": "float16", "float16": "bfloat16", "bfloat16": "float32", "float64": "float32"}


def read_curve(curve: Curve, size: float) -> float:
    """Return the curve's value at ``size``; beyond its ends, the value of the nearer end."""
    if size <= curve[0][0]:
        return curve[0][1]
    if size >= curve[-1][0]:
        return curve[-1][1]
    right = bisect.bisect_right(curve, (size, math.inf))
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y0 + (y1 - y0) * math.log(size / x0) / math.log(x1 / x0)


@dataclass(frozen=True)
class Device:
    """The performance figures of one device.

    peak:      FLOP/s by dtype ("float32", "tf32", "bfloat16", "float16", "float8")
    memory:    bytes that training may use
    bandwidth: bytes/s of the device's memory
    launch:    seconds the host needs to launch one kernel
    floor:     seconds the shortest kernel takes on the device
    products:  fraction of ``peak`` that matrix products reach (Curve over FLOPs)
    streams:   fraction of ``bandwidth`` that kernels reach (Curve over bytes); above 1 in a CPU's cache
    attention: fraction of ``peak`` that fused attention reaches
    products_by: ``products`` by dtype, for the measured dtypes; see ``products_of``
    convolutions: fraction of ``peak`` that convolutions reach (Curve over FLOPs); (): ``products`` is used
    convolutions_by: ``convolutions`` by dtype, and by sort, see ``convolutions_of``; values for float32 may be above
               1 because convolutions may use tf32
    update:    fraction of ``bandwidth`` that Adam's update reaches, counted as 28 bytes for each float32 parameter
    origins:   origins of single figures, for those that differ from ``origin``
    cores:     multiprocessors that share a product's tiles; 0: unknown, tile quantization is ignored
    thin:      fraction of the rate that a product keeps (Curve over its smallest dimension); (): 1
    overhead:  seconds that every kernel takes beside its own time on a CPU
    parts:     fraction of the ``streams`` bandwidth that kernels of a kind reach: {"layout bfloat16": 0.3}
    batch_norms_by: the same fraction for batch norm, by dtype: Curve over channels
    attentions_by: ``attention`` by dtype: Curve over keys times width, the work for one query; the entry
               "bfloat16 causal" is for causal attention, with all query-key pairs counted
    function:  seconds per entry of a function such as gelu, if computing takes longer than memory traffic
    training:  ratio of a training step's time to the sum of its kernels' times, which is above 1 because the kernels
               evict each other's data from the caches
    updates:   as ``update``, for other optimizers, counted by the bytes that each reads and writes
    engine:    seconds of host time in training: for a "step", a "micro" batch, an "action" of a pipeline with its
               message, a "unit" whose shards are gathered, a kernel whose weight gradient is "deferred"; missing
               entries are taken from System
    """

    name: str
    peak: dict[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    launch: float = 5e-6
    floor: float = 2e-6
    products: Curve = ((1e6, 0.02), (1e8, 0.25), (1e10, 0.7), (1e12, 0.8))
    streams: Curve = ((1e4, 0.1), (1e6, 0.6), (1e8, 0.85))
    attention: float = 0.45
    origin: Origin = "default"
    products_by: dict[str, Curve] = field(default_factory=dict, hash=False)
    convolutions: Curve = ()
    convolutions_by: dict[str, Curve] = field(default_factory=dict, hash=False)
    update: float = 0.6
    origins: dict[str, Origin] = field(default_factory=dict, hash=False)
    cores: int = 0
    thin: Curve = ()
    overhead: float = 0.0
    function: float = 0.0
    parts: dict[str, float] = field(default_factory=dict, hash=False)
    batch_norms_by: dict[str, Curve] = field(default_factory=dict, hash=False)
    attentions_by: dict[str, Curve] = field(default_factory=dict, hash=False)
    training: float = 1.0
    updates: dict[str, float] = field(default_factory=dict, hash=False)
    engine: dict[str, float] = field(default_factory=dict, hash=False)

    def peak_of(self, dtype: str) -> float:
        """Return the FLOP/s in ``dtype``, or in the dtype that FALLBACK gives for it."""
        return self.peak[self._own(dtype)]

    def products_of(self, dtype: str) -> Curve:
        """Return the fraction of ``peak_of(dtype)`` that matrix products reach, as a curve over FLOPs."""
        return self.products_by.get(self._own(dtype), self.products)

    def convolutions_of(self, dtype: str, sort: str = "") -> Curve:
        """Return the fraction of ``peak_of(dtype)`` that convolutions reach, as a curve over FLOPs.

        sort: "" for any convolution, "1x1", "few" for those with few input channels, or "depthwise"
        """
        every = self.convolutions_by.get(self._own(dtype), self.convolutions) or self.products_of(dtype)
        return self.convolutions_by.get(f"{self._own(dtype)} {sort}", every) if sort else every

    def attention_of(self, dtype: str, each: float, causal: bool) -> float:
        """Return the fraction of ``peak_of(dtype)`` that fused attention reaches; ``each``: keys times width."""
        own = self._own(dtype)
        curve = self.attentions_by.get(f"{own} causal" if causal else own) or self.attentions_by.get(own)
        return read_curve(curve, each) if curve else self.attention

    def origin_of(self, figure: str) -> Origin:
        return self.origins.get(figure, self.origin)

    def _own(self, dtype: str) -> str:
        while dtype not in self.peak:
            dtype = FALLBACK.get(dtype, "float32")
        return dtype


@dataclass(frozen=True)
class Link:
    """A connection between devices. A message of n bytes takes ``latency + n / bandwidth``.

    bandwidth: bytes/s in one direction, for one device (inside a host) or for one host (between hosts)
    tables:    measured seconds of collectives over bytes, by kind and number of ranks: {("all_reduce", 2): Curve}
    overlap:   fraction of a collective that overlaps with computation when both run at once (1: all of it)
    rails:     number of ports that share a host's bandwidth; a device uses one port
    skew:      extra seconds of a collective in the middle of computation, because its ranks wait for each other
    """

    name: str
    bandwidth: float
    latency: float
    tables: dict[tuple[str, int], Curve] = field(default_factory=dict, hash=False)
    overlap: float = 1.0
    origin: Origin = "default"
    origins: dict[str, Origin] = field(default_factory=dict, hash=False)
    rails: int = 1
    skew: float = 0.0

    def origin_of(self, figure: str) -> Origin:
        return self.origins.get(figure, self.origin)

    def faster(self, times: float, latency: float = 1.0) -> Link:
        """Return a copy with ``times`` the bandwidth and ``latency`` times the latency."""
        tables = {key: _faster(curve, times, latency) for key, curve in self.tables.items()}
        return replace(self, bandwidth=self.bandwidth * times, latency=self.latency * latency, tables=tables)


def _faster(curve: Curve, times: float, latency: float) -> Curve:
    """Scale a measured curve: the smallest message's time counts as latency, additional time as bandwidth."""
    start = curve[0][1]
    return tuple((size, start * latency + max(0.0, seconds - start) / times) for size, seconds in curve)


@dataclass(frozen=True)
class Host:
    """The devices of one host and the link between them."""

    devices: tuple[Device, ...]
    link: Link


@dataclass(frozen=True)
class Cluster:
    """All hosts of a job. Ranks are numbered host by host.

    hosts:   groups of equal hosts: ``((4, host),)`` means four equal hosts
    network: link between hosts; its bandwidth is that of one host
    name:    name of the cluster

    >>> cluster = echelon.planner.Cluster.parse("4x8xH100")
    """

    hosts: tuple[tuple[int, Host], ...]
    network: Link  # between hosts; its bandwidth is that of one host
    name: str = ""

    @staticmethod
    def parse(text: str | Path, *, bench: str | Path | Literal[False] | None = None) -> Cluster:
        """Parse a cluster description or read a file.

        Figures measured by ``echelon bench`` replace those of the catalog.

        text:  ``"4x8xH100"``, ``"8xV100"``, ``"2x8xV100+1x8xT4"``, ``"4x8xH100@100Gb"``, the path of a YAML file, or
               ``"here"``
        bench: bench file with the measured figures; default: the file at the default path, if it exists; False: none

        >>> cluster = echelon.planner.Cluster.parse("2x8xV100+1x8xT4")
        """
        from echelon.planner.cluster.parse import parse

        return parse(text, bench)

    def to_yaml(self, path: str | Path) -> None:
        """Write the cluster to a YAML file that ``parse`` reads.

        path: file to write

        >>> echelon.planner.Cluster.parse("4x8xH100").to_yaml("cluster.yaml")
        """
        from echelon.planner.cluster.yaml_file import write

        write(self, path)

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(count * len(host.devices) for count, host in self.hosts)

    @property
    def host_count(self) -> int:
        return sum(count for count, _ in self.hosts)

    @property
    def kinds(self) -> tuple[Device, ...]:
        """One device of each name, in order of first appearance."""
        return tuple(set_by_name(device for _, host in self.hosts for device in host.devices))

    @property
    def uniform(self) -> bool:
        """True if all devices and all hosts are equal."""
        return len(self.hosts) == 1 and len(self.kinds) == 1

    def devices(self) -> Iterator[Device]:
        """Yield the devices host by host, in order of rank."""
        for count, host in self.hosts:
            for _ in range(count):
                yield from host.devices

    def place(self, rank: int) -> tuple[int, int, Host]:
        """Return the index of the host that ``rank`` is on, its index among the host's devices, and the host."""
        before, ranks = 0, rank
        for count, host in self.hosts:
            here = len(host.devices)
            if ranks < count * here:
                return before + ranks // here, ranks % here, host
            before, ranks = before + count, ranks - count * here
        raise IndexError(f"rank {rank} of a cluster of {self.size} devices")

    def device(self, rank: int) -> Device:
        _, place, host = self.place(rank)
        return host.devices[place]

    def with_(
        self,
        *,
        network: float = 1.0,
        latency: float = 1.0,
        link: float = 1.0,
        memory: float = 1.0,
        speed: float = 1.0,
        bandwidth: float = 1.0,
        hosts: int | None = None,
        device: str | Device | None = None,
    ) -> Cluster:
        """Return a changed copy for what-if questions.

        network, latency: factors on bandwidth and latency between hosts
        link:             factor on the bandwidth inside hosts
        memory, speed, bandwidth: factors on the memory, the peak FLOP/s and the memory bandwidth of every device
        hosts:            number of hosts; several kinds of hosts keep their proportion
        device:           device that replaces all devices

        >>> slower = echelon.planner.Cluster.parse("4x8xH100").with_(network=0.5)
        """
        from echelon.planner.cluster.device_catalog import device_named

        other = device_named(device) if isinstance(device, str) else device
        whole = self.host_count

        def changed(host: Host) -> Host:
            kinds = {kind.name: _device_with(other or kind, memory, speed, bandwidth) for kind in host.devices}
            return Host(tuple(kinds[kind.name] for kind in host.devices), host.link.faster(link))

        groups = (
            (count if hosts is None else max(1, round(count * hosts / whole)), host) for count, host in self.hosts
        )
        made = tuple((count, changed(host)) for count, host in groups)
        return replace(self, hosts=made, network=self.network.faster(network, latency))

    def table(self) -> str:
        """Return a table of all figures, one per line, with their origins."""
        from echelon.planner.cluster.yaml_file import table

        return table(self)

    def __str__(self) -> str:
        return self.name or " + ".join(f"{count}x{_devices_in_words(host)}" for count, host in self.hosts)


def _device_with(device: Device, memory: float, speed: float, bandwidth: float) -> Device:
    peak = {dtype: flops * speed for dtype, flops in device.peak.items()}
    return replace(device, peak=peak, memory=device.memory * memory, bandwidth=device.bandwidth * bandwidth)


def _devices_in_words(host: Host) -> str:
    names = [device.name for device in host.devices]
    return "+".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))


def set_by_name(devices: Iterable[Device]) -> list[Device]:
    """Return one device of each name."""
    return list({device.name: device for device in devices}.values())


def with_memory_limit(cluster: Cluster, memory: float | None) -> Cluster:
    """Return the cluster with ``memory`` bytes on every device, or unchanged if it is None."""
    if memory is None:
        return cluster
    if memory <= 0:
        raise UsageError(f"memory={memory:g}: a device has more than 0 bytes")
    kinds = {
        device.name: replace(device, memory=float(memory), origins={**device.origins, "memory": "given"})
        for device in cluster.kinds
    }
    groups = (
        (count, Host(tuple(kinds[device.name] for device in host.devices), host.link)) for count, host in cluster.hosts
    )
    return replace(cluster, hosts=tuple(groups))
