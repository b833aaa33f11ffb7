"""Parser of cluster descriptions: ``4x8xH100``, ``2x8xV100+1x8xT4``, ``4x8xH100@100Gb``, a file path, ``here``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from echelon.base.errors import UsageError
from echelon.base.quantities import quantity
from echelon.planner.cluster.bench_file import BenchMeasurements, measurements
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.cluster.device_catalog import DeviceSpec, find_kind, kind_named

_FORMS = "write 4x8xH100 (hosts x devices x kind), 8xV100 (one host), 2x8xV100+1x8xT4, a .yaml file or here"
_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class DeviceResolver:
    """Resolves device names: to a device of the cluster file, or to the catalog's with measured figures if any."""

    measured: BenchMeasurements | None = None
    own: Mapping[str, Device] = field(default_factory=dict)

    def with_devices(self, own: Mapping[str, Device]) -> DeviceResolver:
        return replace(self, own=own)

    def known(self, name: str) -> DeviceSpec | None:
        return find_kind(name) or (self.measured.kind(name) if self.measured else None)

    def kind(self, name: str, where: str = "") -> DeviceSpec:
        known = self.known(name)
        device = self.own.get(name) or (self.own.get(known.device.name) if known else None)
        if device is None:
            kind = known or kind_named(name, where)
            return self.measured.on(kind) if self.measured else kind
        like = known or find_kind("A100")
        assert like is not None
        return replace(like, device=device)


def parse(text: str | Path, bench: str | Path | Literal[False] | None) -> Cluster:
    word = str(text).strip()
    makings = DeviceResolver(measurements(bench))
    if Path(word).suffix.lower() in _FILES:
        from echelon.planner.cluster.yaml_file import read

        return read(Path(word), makings)
    plain, _, network = word.partition("@")
    if here := re.fullmatch(r"(?:(\d+)x)?here", plain.lower()):
        from echelon.planner.cluster.detect import find_here

        return find_here(_count(here[1], word) if here[1] else None, makings.measured)
    return _with_network(_cluster(plain, word, makings), network, word)


def _cluster(plain: str, word: str, makings: DeviceResolver) -> Cluster:
    groups = [_group(part.strip(), word, makings) for part in plain.split("+")]
    hosts = tuple((count, host) for count, host, _ in groups)
    return Cluster(hosts, slowest([network for _, _, network in groups]), word)


def _group(part: str, word: str, makings: DeviceResolver) -> tuple[int, Host, Link]:
    """Parse one group: ``4x8xH100`` is four hosts with eight devices, ``8xV100`` one host, ``H200`` one device."""
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([A-Za-z][\w ./()-]*|4090)", part, re.IGNORECASE)
    if not found:
        raise UsageError(f"cluster '{word}': '{part}' describes no machines; {_FORMS}")
    first, second, name = found.groups()
    hosts, devices = (first, second) if second else ("1", first or "1")
    kind = makings.kind(name, f"cluster '{word}': ")
    return _count(hosts, word), Host((kind.device,) * _count(devices, word), kind.link), kind.network


def _count(text: str, word: str) -> int:
    if not 1 <= int(text) <= 10_000_000:
        raise UsageError(f"cluster '{word}': {text} is no number of hosts or devices from 1 to 10,000,000; {_FORMS}")
    return int(text)


def _with_network(cluster: Cluster, network: str, word: str) -> Cluster:
    if not network and "@" not in word:
        return cluster
    bandwidth = quantity(network, "bytes/s", f"cluster '{word}'")
    ports = re.match(r"\s*(\d+)\s*x", network)
    rails = int(ports[1]) if ports else 1
    given = replace(cluster.network, name=f"{network} a host", bandwidth=bandwidth, rails=rails, tables={})
    return replace(cluster, network=replace(given, origins=given.origins | {"bandwidth": "given"}))


def slowest(links: Sequence[Link]) -> Link:
    """Return the link with the least bandwidth, which limits communication over all of them."""
    return min(links, key=lambda link: link.bandwidth)
