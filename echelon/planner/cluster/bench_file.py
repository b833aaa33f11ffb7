"""Reader and writer of bench files: JSON that ``echelon bench`` writes, with measured figures by device name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from echelon.base.config import build, require, strict
from echelon.base.console import say
from echelon.base.environment import CACHE_HOME
from echelon.base.errors import UsageError
from echelon.planner.cluster.cluster import Link
from echelon.planner.cluster.device_catalog import PCIE3, PCIE_LATENCY, DeviceSpec, find_kind
from echelon.planner.cluster.schema import DeviceEntry, LinkEntry

FORMAT = "echelon bench"
VERSION = 1
_AGAIN = "measure again with 'echelon bench'"


@strict
class MachineEntry:
    """The machine that was measured.

    processes: number of processes that measured at the same time: figures of a CPU are those of one busy process
    load:      one-minute load average per core, taken by ``echelon bench``
    """

    processor: str
    cores: int
    torch: str
    processes: int
    gpus: tuple[str, ...] = ()
    when: str = ""
    load: float = 0.0


@strict
class BenchEntry:
    """The contents of a bench file.

    links: links inside a host by device name; ``H200 shared`` is the link between ranks that share one H200
    rows:  raw measurements, from which the curves were made
    """

    format: str
    version: int
    machine: MachineEntry
    seconds: float
    devices: dict[str, DeviceEntry]
    links: dict[str, LinkEntry]
    rows: dict[str, Any]

    def __post_init__(self) -> None:
        require(self.version == VERSION, self, "version", f"{VERSION}; {_AGAIN}")


def default_path() -> Path:
    base = os.environ.get(CACHE_HOME, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "echelon" / "bench.json"


def write(values: dict[str, Any], path: Path) -> None:
    """Write the bench file atomically, because another process may be reading the old file."""
    with _refused(path):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def make_room(path: Path) -> None:
    """Check that the file can be written, before two minutes are spent on measuring. Raises UsageError if not."""
    with _refused(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        path.with_name(f".{path.name}.{os.getpid()}").touch()
        path.with_name(f".{path.name}.{os.getpid()}").unlink()


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"bench file '{path}' cannot be written: {error.strerror}; give another with --out") from None


def read(path: Path) -> BenchEntry:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no bench file at '{path}'; make one with 'echelon bench --out {path}'") from None
    except OSError as error:
        raise UsageError(f"bench file '{path}' cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"bench file '{path}' is damaged: it is no JSON; {_AGAIN}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"'{path}' is no bench file: it does not say format '{FORMAT}'; {_AGAIN}")
    try:
        entry = build(BenchEntry, values, "bench")
        for name, device in entry.devices.items():
            device.figures(f"devices.{name}")
    except UsageError as error:
        raise UsageError(f"bench file '{path}' is damaged: {error}") from None
    return entry


def measurements(bench: str | Path | Literal[False] | None) -> BenchMeasurements | None:
    """Return the measurements of the given bench file, or of the default one if it exists and is readable.

    bench: path; default: the default path; False: no measurements
    """
    if bench is False:
        return None
    if bench is not None:
        return BenchMeasurements(Path(bench), read(Path(bench)), named=True)
    path = default_path()
    if not path.exists():
        return None
    try:
        return BenchMeasurements(path, read(path), named=False)
    except UsageError as error:
        say(f"{error}; until then plans take the catalogue's figures")
        return None


@dataclass(frozen=True)
class BenchMeasurements:
    """The figures of one bench file. ``named``: True if the user named the file, which may be of another machine."""

    path: Path
    entry: BenchEntry
    named: bool

    def kind(self, name: str) -> DeviceSpec | None:
        """Return a device that only this file describes, or None."""
        from echelon.planner.cluster.device_catalog import normalize_device_name

        for known, device in self.entry.devices.items():
            if (
                normalize_device_name(known) == normalize_device_name(name)
                and device.memory is not None
                and find_kind(known) is None
            ):
                made = replace(device.alone(known, f"{self.path}: devices.{known}"), origin="measured")
                fallback = find_kind("T4")
                assert fallback is not None
                return DeviceSpec(made, Link("PCIe", PCIE3, PCIE_LATENCY), fallback.network)
        return None

    def on(self, kind: DeviceSpec) -> DeviceSpec:
        """Return ``kind`` with measured figures in place of the catalog's."""
        name = kind.device.name
        if name not in self.entry.devices:
            if self.named:
                say(f"{self.path} has figures of {', '.join(self.entry.devices)}, not of {name}: defaults are used")
            return kind
        if not self.named and not self.fits_here(name):
            return kind
        device = self.entry.devices[name].on(kind.device, "measured", f"{self.path}: devices.{name}")
        return replace(kind, device=device, link=self.link(name, kind.link))

    def link(self, name: str, default: Link) -> Link:
        entry = self.entry.links.get(name)
        return entry.on(default, "measured", f"{self.path}: links.{name}") if entry else default

    def fits_here(self, name: str) -> bool:
        """Return True if the file's figures of ``name`` apply to this machine.

        All CPUs have the name "CPU", so figures of a CPU apply only if they were measured on the same processor.
        """
        from echelon.planner.cluster.detect import processor

        there, here = self.entry.machine.processor, processor()
        if name == "CPU" and there != here:
            say(f"{self.path} was measured on '{there}', this is '{here}': defaults are used; {_AGAIN}")
            return False
        return True
