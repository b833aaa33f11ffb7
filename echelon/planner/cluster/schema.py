"""Schema of devices and links in files: cluster descriptions (YAML) and measurements (``echelon bench``, JSON).

Figures that an entry omits are taken from the catalog. Figures are numbers in base units (bytes, seconds, FLOP/s) or
text with a unit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

from echelon.base.config import require, strict
from echelon.base.errors import UsageError
from echelon.base.quantities import Kind, quantity
from echelon.planner.cluster.cluster import Curve, Device, Link, Origin

_UNITS: dict[str, Kind] = {
    "memory": "bytes",
    "bandwidth": "bytes/s",
    "launch": "seconds",
    "floor": "seconds",
    "latency": "seconds",
}


@strict
class DeviceEntry:
    """Figures of a device; see Device. ``like`` names the kind in the catalog that provides the omitted figures."""

    like: str | None = None
    peak: dict[str, float | str] | None = None
    memory: float | str | None = None
    bandwidth: float | str | None = None
    launch: float | str | None = None
    floor: float | str | None = None
    products: Curve | None = None
    streams: Curve | None = None
    attention: float | None = None
    products_by: dict[str, Curve] | None = None
    convolutions: Curve | None = None
    convolutions_by: dict[str, Curve] | None = None
    update: float | None = None
    cores: int | None = None
    thin: Curve | None = None
    overhead: float | None = None  # seconds, as function and engine; all three may be 0
    function: float | None = None
    parts: dict[str, float] | None = None
    batch_norms_by: dict[str, Curve] | None = None
    attentions_by: dict[str, Curve] | None = None
    training: float | None = None
    updates: dict[str, float] | None = None
    engine: dict[str, float] | None = None
    origin: Origin | None = None
    origins: dict[str, Origin] | None = None

    def __post_init__(self) -> None:
        for name in ("products", "streams", "convolutions", "thin"):
            require(_rises(getattr(self, name) or ()), self, name, "pairs of numbers above 0, the first rising")
        for name in ("products_by", "convolutions_by", "batch_norms_by", "attentions_by"):
            for curve in (getattr(self, name) or {}).values():
                require(bool(curve) and _rises(curve), self, name, "pairs of numbers above 0, the first rising")
        for name in ("attention", "update"):
            require(getattr(self, name) is None or getattr(self, name) > 0, self, name, "a part of the peak, above 0")
        require(self.cores is None or self.cores >= 0, self, "cores", "0 or more")
        for name in ("overhead", "function"):
            require((getattr(self, name) or 0) >= 0, self, name, "seconds, 0 or more")
        for name in ("updates", "parts"):
            require(all(part > 0 for part in (getattr(self, name) or {}).values()), self, name, "parts above 0")
        require(all(seconds >= 0 for seconds in (self.engine or {}).values()), self, "engine", "seconds, 0 or more")

    def figures(self, where: str) -> dict[str, Any]:
        """Return the given figures in base units."""
        found = _figures(self, where)
        if self.peak is not None:
            found["peak"] = {dtype: quantity(flops, "FLOP/s", f"{where}.peak") for dtype, flops in self.peak.items()}
        return found

    def on(self, device: Device, origin: Origin, where: str) -> Device:
        """Return ``device`` with these figures in place of its own."""
        given = self.figures(where)
        origins: dict[str, Origin] = device.origins | dict.fromkeys(given, origin)
        if "peak" in given:
            given["peak"] = device.peak | given["peak"]
        for name in ("products", "convolutions"):
            if name in given and f"{name}_by" not in given:
                given[f"{name}_by"] = {}  # curves by dtype take precedence, and older ones must not override this curve
        return replace(
            device,
            **given,
            origin=self.origin or device.origin,
            origins=origins if self.origins is None else self.origins,
        )

    def alone(self, name: str, where: str) -> Device:
        """Return a device that is described by this entry alone. Raises UsageError if a required figure is missing."""
        missing = [figure for figure in ("peak", "memory", "bandwidth") if getattr(self, figure) is None]
        if missing or "float32" not in (self.peak or {}):
            lacks = ", ".join(missing) or "peak.float32"
            raise UsageError(f"{where}: a device of its own needs {lacks}; or name one that it is 'like'")
        origin: Origin = self.origin or "given"
        return Device(name, **self.figures(where), origin=origin, origins=self.origins or {})


@strict
class TableEntry:
    """Measured seconds of one collective among ``ranks`` ranks, by bytes."""

    kind: str
    ranks: int
    seconds: Curve

    def __post_init__(self) -> None:
        require(self.ranks >= 2, self, "ranks", "2 or more")
        require(bool(self.seconds) and _rises(self.seconds), self, "seconds", "pairs above 0, the first rising")


@strict
class LinkEntry:
    """Figures of a link; see Link."""

    bandwidth: float | str | None = None
    latency: float | str | None = None
    overlap: float | None = None
    rails: int | None = None
    skew: float | None = None
    tables: tuple[TableEntry, ...] | None = None
    name: str | None = None
    origin: Origin | None = None
    origins: dict[str, Origin] | None = None

    def __post_init__(self) -> None:
        require(self.overlap is None or 0 <= self.overlap <= 1, self, "overlap", "a number from 0 to 1")
        require(self.rails is None or self.rails >= 1, self, "rails", "1 or more")
        require(self.skew is None or self.skew >= 0, self, "skew", "seconds, 0 or more")

    def on(self, link: Link, origin: Origin, where: str) -> Link:
        given = _figures(self, where)
        origins: dict[str, Origin] = link.origins | dict.fromkeys(given, origin)
        if self.tables is not None:
            given["tables"] = {(table.kind, table.ranks): table.seconds for table in self.tables}
            origins["tables"] = origin
        elif "bandwidth" in given or "latency" in given:
            given["tables"] = {}  # the tables were measured on the link with its former bandwidth and latency
        return replace(
            link,
            **given,
            name=self.name if self.name is not None else link.name,
            origin=self.origin or link.origin,
            origins=origins if self.origins is None else self.origins,
        )


def _figures(entry: DeviceEntry | LinkEntry, where: str) -> dict[str, Any]:
    not_figures = {"like", "name", "origin", "origins", "tables", "peak"}
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    given = {name: value for name, value in values.items() if value is not None and name not in not_figures}
    return {
        name: quantity(value, _UNITS[name], f"{where}.{name}") if name in _UNITS else value
        for name, value in given.items()
    }


def _rises(curve: Curve) -> bool:
    sizes = [size for size, _ in curve]
    above = all(number > 0 and math.isfinite(number) for pair in curve for number in pair)
    return above and all(left < right for left, right in itertools.pairwise(sizes))


def plain_device(device: Device) -> dict[str, Any]:
    """Return all figures of the device as plain values; ``DeviceEntry`` reads the same device back."""
    named = {field.name: getattr(device, field.name) for field in fields(device) if field.name != "name"}
    return {name: _plain(value) for name, value in named.items()}


def plain_link(link: Link) -> dict[str, Any]:
    named = {field.name: _plain(getattr(link, field.name)) for field in fields(link) if field.name != "tables"}
    tables = [
        {"kind": kind, "ranks": ranks, "seconds": _plain(curve)} for (kind, ranks), curve in sorted(link.tables.items())
    ]
    return {**named, "tables": tables}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value
