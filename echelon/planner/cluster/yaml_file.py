"""Reader and writer of cluster files in YAML, and the table of a cluster's figures. An example of a file:

name: two kinds
hosts:
  - {count: 2, devices: 8xV100, link: 130 GB/s}
  - {count: 1, devices: 8xT4}
network: {bandwidth: 100 Gb/s, latency: 10 us}
devices:                                   # figures that replace the catalog's, or new devices
  V100: {memory: 30 GB}
  Mine: {like: A100, bandwidth: 1.5 TB/s}
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.base.config import build, require, strict
from echelon.base.errors import UsageError
from echelon.base.formatting import text_table
from echelon.base.quantities import quantity, show
from echelon.planner.cluster.cluster import Cluster, Curve, Device, Host, Link
from echelon.planner.cluster.parse import DeviceResolver, slowest
from echelon.planner.cluster.schema import DeviceEntry, LinkEntry, plain_device, plain_link

_LinkEntry = LinkEntry | float | str
_Row = tuple[str, str, str, str]


@strict
class ClusterHostEntry:
    """A group of ``count`` equal hosts. ``devices``: ``8xV100``, or several kinds in sequence: ``4xV100+4xT4``."""

    devices: str
    count: int = 1
    link: _LinkEntry | None = None

    def __post_init__(self) -> None:
        require(self.count >= 1, self, "count", "1 or more")


@strict
class ClusterEntry:
    hosts: tuple[ClusterHostEntry, ...]
    network: _LinkEntry | None = None
    devices: dict[str, DeviceEntry] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        require(bool(self.hosts), self, "hosts", "one or more")


def read(path: Path, makings: DeviceResolver) -> Cluster:
    """Return the cluster described by a file; ``makings`` resolves devices that the file does not describe."""
    entry = _entry(path)
    own = {name: _own_device(name, given, path, makings) for name, given in (entry.devices or {}).items()}
    makings = makings.with_devices(own)
    hosts = tuple(
        (host.count, _host(host, f"{path}: hosts[{number}]", makings)) for number, host in enumerate(entry.hosts)
    )
    names = [device.name for _, host in hosts for device in host.devices[:1]]
    network = slowest([makings.kind(name, f"{path}: ").network for name in names])
    return Cluster(hosts, _link(entry.network, network, f"{path}: network"), entry.name or path.stem)


def _entry(path: Path) -> ClusterEntry:
    from echelon.strategy.strategy_files import read as read_values

    try:
        values = read_values(path)
        return build(ClusterEntry, values, "cluster")
    except UsageError as error:
        said = str(error).replace("strategy file", "cluster file").replace("'amp: bf16'", "'hosts: [...]'")
        raise UsageError(said if str(path) in said else f"{path}: {said}") from None


def _own_device(name: str, entry: DeviceEntry, path: Path, makings: DeviceResolver) -> Device:
    where = f"{path}: devices.{name}"
    if not re.fullmatch(r"[A-Za-z][\w ./()-]*", name):
        raise UsageError(f"{where}: a device's name begins with a letter and has no '+', '@' or ','")
    if entry.like is None and makings.known(name) is None:
        return entry.alone(name, where)
    device = makings.kind(entry.like or name, f"{where}: ").device
    return replace(entry.on(device, "given", where), name=name if entry.like else device.name)


def _host(entry: ClusterHostEntry, where: str, makings: DeviceResolver) -> Host:
    devices: list[Device] = []
    kinds = []
    for word in entry.devices.split("+"):
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(.+?)\s*", word)
        if not found or found[1] == "0":
            raise UsageError(f"{where}: '{entry.devices}' names no devices; write 8xV100, or 4xV100+4xT4")
        kind = makings.kind(found[2], f"{where}: ")
        kinds.append(kind)
        devices += [kind.device] * int(found[1] or 1)
    link = slowest([kind.link for kind in kinds])
    return Host(tuple(devices), _link(entry.link, link, f"{where}.link"))


def _link(entry: _LinkEntry | None, default: Link, where: str) -> Link:
    if entry is None:
        return default
    if not isinstance(entry, LinkEntry):
        entry = LinkEntry(bandwidth=quantity(entry, "bytes/s", where), name="")
    return entry.on(default, "given", where)


def write(cluster: Cluster, path: str | Path) -> None:
    import yaml

    text = yaml.safe_dump(to_plain(cluster), sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cluster file '{path}' cannot be written: {error.strerror}; give another path") from None


def to_plain(cluster: Cluster) -> dict[str, Any]:
    hosts = [
        {"count": count, "devices": _runs(host.devices), "link": plain_link(host.link)} for count, host in cluster.hosts
    ]
    devices = {device.name: plain_device(device) for device in cluster.kinds}
    return {"name": cluster.name, "hosts": hosts, "network": plain_link(cluster.network), "devices": devices}


def _runs(devices: tuple[Device, ...]) -> str:
    """Return the devices as text with equal neighbors joined: ``4xV100+4xT4``."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(device.name for device in devices)]
    return "+".join(f"{count}x{name}" for name, count in runs)


def table(cluster: Cluster) -> str:
    """Return a table of all figures, one per line, with their origins."""
    rows: list[_Row] = [("cluster", "hosts", f"{cluster.host_count} ({cluster.size} devices)", "")]
    for device in cluster.kinds:
        rows += _device_rows(device)
    for number, (_, host) in enumerate(cluster.hosts):
        if len(host.devices) == 1:
            continue
        rows += _link_rows(f"inside host {number}" if len(cluster.hosts) > 1 else "inside a host", host.link)
    if cluster.host_count > 1:
        rows += _link_rows("between hosts", cluster.network)
    return "\n".join(text_table(rows))


def link_table(place: str, link: Link) -> str:
    """Return the table of one link's figures."""
    return "\n".join(text_table(_link_rows(place, link)))


def _device_rows(device: Device) -> list[_Row]:
    figures: list[tuple[str, str, str]] = [
        (f"peak {dtype}", show(flops, "FLOP/s"), "peak") for dtype, flops in device.peak.items()
    ]
    figures += [
        ("memory", show(device.memory, "bytes"), "memory"),
        ("bandwidth", show(device.bandwidth, "bytes/s"), "bandwidth"),
        ("launch", show(device.launch, "seconds"), "launch"),
        ("shortest kernel", show(device.floor, "seconds"), "floor"),
    ]
    figures += _curves("products", device.products, device.products_by)
    if device.convolutions:
        figures += _curves("convolutions", device.convolutions, device.convolutions_by)
    figures += [
        ("attention", f"{device.attention:.2f} of peak", "attention"),
        ("streams", _curve(device.streams, "B", "bandwidth"), "streams"),
        ("update (Adam)", f"{device.update:.2f} of bandwidth", "update"),
        *((f"update ({name})", f"{part:.2f} of bandwidth", "updates") for name, part in device.updates.items()),
    ]
    figures += _host_figures(device)
    return [(device.name, name, text, device.origin_of(figure)) for name, text, figure in figures]


def _host_figures(device: Device) -> list[tuple[str, str, str]]:
    """Return the rows of host-time figures, and of figures that exist for CPU devices only, if they were measured."""
    figures = [(f"engine, {what}", show(seconds, "seconds"), "engine") for what, seconds in device.engine.items()]
    if device.thin:
        figures.append(("thin products", _curve(device.thin, "rows", "their rate"), "thin"))
    for name, seconds in (("overhead", device.overhead), ("function", device.function)):
        figures += [(f"{name}, each", show(seconds, "seconds"), name)] if seconds else []
    return figures + ([("training", f"{device.training:.2f} of its kernels", "training")] if device.overhead else [])


def _curves(name: str, curve: Curve, by_dtype: dict[str, Curve]) -> list[tuple[str, str, str]]:
    if not by_dtype:
        return [(name, _curve(curve, "FLOP", "peak"), name)]
    return [(f"{name} {dtype}", _curve(each, "FLOP", "peak"), f"{name}_by") for dtype, each in by_dtype.items()]


def _link_rows(place: str, link: Link) -> list[_Row]:
    rows: list[_Row] = [
        (place, f"bandwidth ({link.name})" if link.name else "bandwidth", show(link.bandwidth, "bytes/s"), "bandwidth"),
        (place, "latency", show(link.latency, "seconds"), "latency"),
        (place, "hidden by computing", f"{link.overlap:.2f}", "overlap"),
        *([(place, "waiting for each other", show(link.skew, "seconds"), "skew")] if link.skew else []),
    ]
    for (kind, ranks), curve in sorted(link.tables.items()):
        ends = " ... ".join(f"{show(size, 'bytes')}: {show(seconds, 'seconds')}" for size, seconds in _ends(curve))
        rows.append((place, f"{kind}, {ranks} ranks", ends, "tables"))
    return [(place, name, text, link.origin_of(figure)) for place, name, text, figure in rows]


def _ends(curve: Curve) -> Curve:
    return (curve[0], curve[-1]) if len(curve) > 1 else curve


def _curve(curve: Curve, unit: str, whole: str) -> str:
    (small, low), (large, high) = curve[0], curve[-1]
    return f"{low:.2g} of {whole} at {small:.0e} {unit}, {high:.2g} at {large:.0e}"
