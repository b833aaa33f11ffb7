"""``echelon bench``: measure this machine in under two minutes and write a file that the planner reads."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.planner.cluster.bench_file import FORMAT, VERSION, default_path, make_room, measurements, write
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.detect import cores, gpu_kind, processor, shared_link, shared_name
from echelon.planner.cluster.device_catalog import CATALOGUE, DeviceSpec, kind_named
from echelon.planner.cluster.yaml_file import link_table
from echelon.tools.bench.fit_figures import device_figures, link_figures
from echelon.tools.bench.ranks import run_ranks

#: Largest number of ranks: more of them add no information for a plan on one host, and take longer.
MOST = 8
#: Load per core above which other processes distort the measurements.
BUSY = 0.5


def bench(out: str | Path | None = None, procs: int | None = None, quick: bool = False) -> Path:
    """Measure this machine, write the file, print its contents, and return its path."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes = _processes(gpus, quick) if procs is None else procs
    if processes < 1:
        raise UsageError(f"--procs {procs}: expected 1 or more processes")
    path = Path(out) if out else default_path()
    make_room(path)
    kind = gpu_kind(0) if gpus else kind_named("CPU")
    _say(f"{kind.device.name}, {processes} processes{', quickly' if quick else ''}; under two minutes")
    machine = _machine(gpus, processes)
    busy = _busy(machine["load"])
    start = time.monotonic()
    rows = run_ranks(processes, quick)
    if processes > 1 and not gpus:
        rows |= run_ranks(2, quick, engine=True)
    seconds = time.monotonic() - start
    write(_values(rows, kind, machine, seconds), path)
    _show(path, processes, gpus, kind.device.name)
    print(f"measured in {seconds:.0f} s{busy}; written to {path}")
    return path


def _machine(gpus: int, processes: int) -> dict[str, Any]:
    import torch

    return {
        "processor": processor(),
        "cores": cores(),
        "torch": torch.__version__,
        "processes": processes,
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0] / cores(), 2),
    }


def _busy(load: float) -> str:
    """Return a note for the output if other processes load the machine, and warn; else return ""."""
    if load <= BUSY:
        return ""
    words = f" on a busy machine ({load:.1f} other processes for each core)"
    _say(f"measuring{words}: figures will be too low; measure again when it is idle")
    return words


def _processes(gpus: int, quick: bool) -> int:
    """Return the number of processes: one per GPU or core, but enough to measure communication."""
    few = 2 if quick or gpus else 4
    return min(MOST, max(few, gpus or (2 if quick else cores())))


def _values(rows: dict[str, Any], kind: DeviceSpec, machine: dict[str, Any], seconds: float) -> dict[str, Any]:
    device, gpus, processes = kind.device, len(machine["gpus"]), machine["processes"]
    known = device.name in CATALOGUE and device.name != "CPU"
    figures = device_figures(rows, device, known)
    if not known and gpus:
        figures["memory"] = device.memory
    links = {}
    if processes > 1:
        shared = 0 < gpus < processes
        links[shared_name(device.name) if shared else device.name] = link_figures(rows, "NCCL" if gpus > 1 else "Gloo")
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": machine,
        "seconds": round(seconds, 1),
        "devices": {device.name: figures},
        "links": links,
        "rows": rows,
    }


def _show(path: Path, processes: int, gpus: int, name: str) -> None:
    """Print the measured machine; if ranks share a GPU, also print the link between them."""
    shared = 0 < gpus < processes
    ranks = min(processes, gpus or cores())
    print(Cluster.parse(f"{ranks}xhere", bench=path).table())
    if shared:
        print(link_table(shared_name(name), shared_link(name, measurements(path))))


def _say(line: str) -> None:
    print(f"echelon bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    bench(sys.argv[1] if len(sys.argv) > 1 else None)
