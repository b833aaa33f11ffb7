"""Facts about one host, except its network: system, versions, capacity and limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import sys
from pathlib import Path

import torch

import echelon
from echelon.base.environment import KUBERNETES
from echelon.planner.cluster.detect import cores, memory_bytes, processor
from echelon.tools.doctor.bounded_check import Facts
from echelon.tools.doctor.redact import without_home

_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


def system() -> Facts:
    return {
        "name": socket.gethostname(),
        "os": os_name(_read("/etc/os-release")),
        "kernel": platform.release(),
        "machine": machine_identity(),
        "container": container_kind(),
    }


def versions() -> Facts:
    """Return versions and installation paths; most versions must be the same on all hosts."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "driver": driver_version(_read("/proc/driver/nvidia/version")),
        "echelon": echelon.__version__,
        "from": without_home(str(Path(echelon.__file__).parent)),
        "executable": without_home(sys.executable),
        "gpus": torch.cuda.device_count(),
    }


def capacity(root: Path = Path("/")) -> Facts:
    """Return the cores and memory of the host, and the part that cgroup and affinity allow. Memory is in bytes."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "affinity": allowed,
        "usable_cores": cores(root),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "usable_memory": memory_bytes(root),
        "available_memory": available_memory((root / "proc/meminfo").read_text(encoding="utf-8")),
        "shared_memory": _shared_memory(),
        "load": os.getloadavg()[0],
    }


def limits() -> Facts:
    """Return the soft limits (``None`` for unlimited) and the RDMA devices, which need locked memory."""
    found: Facts = {name: _soft(number) for name, number in _LIMITS.items()}
    return found | {"rdma": rdma_devices(Path("/sys/class/infiniband"))}


def machine_identity() -> str:
    """Return an identifier that is equal for launchers on one machine in one network namespace.

    Such launchers can reach each other through loopback.
    """
    return f"{_read('/proc/sys/kernel/random/boot_id').strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def container_kind() -> str | None:
    if os.environ.get(KUBERNETES):
        return "kubernetes"
    return "docker" if Path("/.dockerenv").exists() else None


def os_name(release: str) -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    return found[1] if found else platform.system()


def driver_version(text: str) -> str | None:
    """Return the version of the NVIDIA kernel driver, also if torch cannot use the driver; None without a driver."""
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else None


def nccl_version() -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def available_memory(meminfo: str) -> float | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return float(found[1]) * 1024 if found else None


def rdma_devices(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def _shared_memory() -> float | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return float(found.f_blocks * found.f_frsize)


def _soft(number: int) -> int | None:
    value = resource.getrlimit(number)[0]
    return None if value == resource.RLIM_INFINITY else value


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
