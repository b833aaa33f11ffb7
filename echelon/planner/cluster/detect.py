"""Detection of this machine's GPUs, or of the CPU cores and memory that its control group allows."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from echelon.base.environment import detect_rank_info
from echelon.base.errors import UsageError
from echelon.planner.cluster.bench_file import BenchMeasurements
from echelon.planner.cluster.cluster import Cluster, Device, Host, Link
from echelon.planner.cluster.device_catalog import PCIE4, PCIE_LATENCY, RESERVE, DeviceSpec, find_kind, kind_named

#: Bytes used by a process that has imported torch and has no tensors yet.
PROCESS = 0.4 * 1024**3


def find_here(ranks: int | None = None, measured: BenchMeasurements | None = None) -> Cluster:
    """Return this machine as a cluster of ``ranks`` devices.

    ranks: number of devices; default: the number of local ranks of the current job, or of GPUs, or of cores
    """
    import torch

    from echelon.distributed import world as worlds

    place = worlds.current().place if worlds.is_initialized() else detect_rank_info()
    hosts = 1 if ranks else max(1, place.world_size // place.local_world_size)
    if ranks is None and place.world_size > 1:
        ranks = place.local_world_size
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    host, network = _gpu_host(ranks or gpus, gpus, measured) if gpus else _cpu_host(ranks or cores(), measured)
    return Cluster(((hosts, host),), network, "here" if hosts == 1 else f"{hosts} hosts like this")


def _cpu_host(ranks: int, measured: BenchMeasurements | None) -> tuple[Host, Link]:
    kind = _measured_here(kind_named("CPU"), measured)
    memory = memory_bytes() / ranks - PROCESS
    if memory <= 0:
        raise UsageError(f"{ranks} ranks cannot share the {memory_bytes() / 1024**3:.1f} GiB here; ask for fewer")
    device = _found(_slowed(kind.device, max(1.0, ranks / cores())), memory=memory)
    return Host((device,) * ranks, kind.link), kind.network


def _gpu_host(ranks: int, gpus: int, measured: BenchMeasurements | None) -> tuple[Host, Link]:
    """Return a host with GPUs. If there are more ranks than GPUs, ranks share GPUs round-robin and use Gloo.

    ``echelon.init`` assigns GPUs in the same way.
    """
    kinds = [_measured_here(gpu_kind(index), measured) for index in range(min(gpus, ranks))]
    each = math.ceil(ranks / gpus)
    devices = tuple(_shared(kinds[rank % gpus].device, each) for rank in range(ranks))
    link = min((kind.link for kind in kinds), key=lambda link: link.bandwidth)
    if each > 1:
        link = shared_link(kinds[0].device.name, measured)
    return Host(devices, link), kinds[0].network


def shared_name(device: str) -> str:
    """Return the name that a bench file gives to the link between ranks that share one device."""
    return f"{device} shared"


def shared_link(device: str, measured: BenchMeasurements | None) -> Link:
    default = kind_named("CPU").link
    return measured.link(shared_name(device), default) if measured else default


def gpu_kind(index: int) -> DeviceSpec:
    """Return the spec of GPU ``index`` with its actual memory.

    A GPU that is not in the catalog gets rough figures by its number of multiprocessors.
    """
    import torch

    properties = torch.cuda.get_device_properties(index)
    kind = find_kind(properties.name) or _rough(properties.name, properties.multi_processor_count)
    return replace(kind, device=_found(kind.device, memory=properties.total_memory - RESERVE))


def _rough(name: str, multiprocessors: int) -> DeviceSpec:
    """Estimate a GPU from its multiprocessors: 128 lanes at 1.5 GHz each, and 4 times that with tensor cores.

    ``echelon bench`` measures the real figures.
    """
    peak = multiprocessors * 128 * 2 * 1.5e9
    device = Device(name, {"float32": peak, "float16": 4 * peak, "bfloat16": 4 * peak}, 1.0, 5e11)
    return DeviceSpec(device, Link("PCIe", PCIE4, PCIE_LATENCY), kind_named("T4").network)


def _measured_here(kind: DeviceSpec, measured: BenchMeasurements | None) -> DeviceSpec:
    if measured is None:
        return kind
    own = kind.device.memory
    if kind.device.name in measured.entry.devices and not measured.fits_here(kind.device.name):
        return kind
    found = measured.on(kind)
    return replace(found, device=_found(found.device, memory=own)) if kind.device.name != "CPU" else found


def _found(device: Device, *, memory: float) -> Device:
    return replace(device, memory=memory, origins=device.origins | {"memory": "measured"})


def _shared(device: Device, ranks: float) -> Device:
    """Return one rank's part of a device that ``ranks`` ranks use at once."""
    if ranks <= 1:
        return device
    peak = {dtype: flops / ranks for dtype, flops in device.peak.items()}
    return replace(device, peak=peak, memory=device.memory / ranks, bandwidth=device.bandwidth / ranks)


def _slowed(device: Device, ranks: float) -> Device:
    """Return one rank's part of cores that ``ranks`` ranks use at once, where host work takes longer too."""
    own = {name: getattr(device, name) * ranks for name in ("launch", "floor", "overhead", "function")}
    engine = {what: seconds * ranks for what, seconds in device.engine.items()}
    return replace(_shared(device, ranks), **own, engine=engine)


def processor() -> str:
    """Return the CPU's model name as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: its CPU affinity, limited by the control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(root, "cpu") for quota in _quota(group)]
    return max(1, min([allowed, *(math.ceil(quota - 0.01) for quota in quotas)]))


def memory_bytes(root: Path = Path("/")) -> float:
    """Return the bytes of installed memory, limited by the control group."""
    limits = [_number(group / name) for group in _groups(root, "memory") for name in _MEMORY_FILES]
    return min([_installed(root), *(limit for limit in limits if limit)])


_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")


def _installed(root: Path) -> float:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemTotal:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups, from the innermost outward, for cgroup v2 and v1.

    In a container, the path that the kernel reports may not be visible; the mounted root is then the process's group.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = mount / controller if names else mount
        inner = top / path.lstrip("/")
        yield from (group for group in (inner, *inner.parents) if group == top or top in group.parents)


def _quota(group: Path) -> Iterator[float]:
    words = _text(group / "cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        yield float(words[0]) / float(words[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    if quota and period and quota > 0:
        yield quota / period


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
