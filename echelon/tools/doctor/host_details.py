"""Details of one host and one rank, with private data removed; every check has a time limit.

A check that hangs or raises is recorded as failed, and the other checks go on.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

import echelon
from echelon.base import network
from echelon.base.environment import (
    BOUND_MARK,
    DOCTOR_RESULT,
    KUBERNETES,
    LEAVE_MARK,
    LOG_DIR,
    MEMORY,
    STALL_JUDGE,
    RankInfo,
)
from echelon.base.errors import one_line
from echelon.distributed.device_choice import choose_device, count_gpus
from echelon.planner.cluster.detect import cores, memory_bytes, processor
from echelon.tools.bench.compute_kernels import product_row
from echelon.tools.bench.device_timer import DeviceTimer
from echelon.tools.bench.memory_bandwidth import stream_row
from echelon.tools.doctor.nics import gloo_choice, nccl_choice

T = TypeVar("T")
#: The result of a check as JSON values. A failed check leaves ``{FAILED: reason}``.
Details = dict[str, Any]
FAILED = "failed"
#: Seconds for one check of a host.
PATIENCE = 10.0
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}
#: Side of the square matrices, and bytes read and written: large enough to fill the device, and still quick.
_GPU_SIDE, _CPU_SIDE, _GPU_STREAM, _CPU_STREAM = 8192, 512, 2**30, 2**26
MASK = "***"
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_SHOWN = ("GLOO_", "NCCL_", "OMP_", "TORCH_", "MKL_", "KMP_", "CUDA_", "ECHELON_", "UCX_")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
#: Internal variables between launcher and ranks, which are not shown.
_OURS = (DOCTOR_RESULT, LOG_DIR, LEAVE_MARK, BOUND_MARK, MEMORY, STALL_JUDGE)
_PASSWORD = re.compile(r"://[^/@\s]*@")


# Checks with a time limit


class CheckFailed(Exception):
    """Raised if a check raised or timed out; the message says why."""


def run_bounded(check: Callable[[], T], seconds: float) -> T:
    """Return the result of ``check``. Raises ``CheckFailed`` if ``check`` raises or takes longer than ``seconds``.

    A check that hangs is left in its daemon thread.
    """
    result: list[T] = []
    broken: list[BaseException] = []

    def doing() -> None:
        try:
            result.append(check())
        except BaseException as error:
            broken.append(error)

    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    if result:
        return result[0]
    if broken:
        raise CheckFailed(one_line(broken[0], 300, typed=True)) from broken[0]
    raise CheckFailed(f"did not end within {seconds:g} s")


def run_check(check: Callable[[], Details], seconds: float) -> Details:
    """Return the result of ``check``, or ``{FAILED: reason}`` if it raises or takes longer than ``seconds``."""
    try:
        return run_bounded(check, seconds)
    except CheckFailed as failure:
        return {FAILED: str(failure)}


# The host


def host_details() -> Details:
    checks = {
        "system": system,
        "versions": versions,
        "capacity": capacity,
        "limits": limits,
        "network": network_details,
    }
    return {name: run_check(check, PATIENCE) for name, check in checks.items()} | {"variables": variables(os.environ)}


def system() -> Details:
    return {
        "name": socket.gethostname(),
        "os": os_name(_read("/etc/os-release")),
        "kernel": platform.release(),
        "machine": machine_identity(),
        "container": container_kind(),
    }


def versions() -> Details:
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


def capacity(root: Path = Path("/")) -> Details:
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


def limits() -> Details:
    """Return the soft limits (``None`` for unlimited) and the RDMA devices, which need locked memory."""
    result: Details = {name: _soft(number) for name, number in _LIMITS.items()}
    return result | {"rdma": rdma_devices(Path("/sys/class/infiniband"))}


def network_details() -> Details:
    nics, own = network.nics(), network.own_name_address()
    return {
        "own_address": own,
        "nics": [asdict(nic) for nic in nics],
        "choices": [asdict(gloo_choice(os.environ, nics, own)), asdict(nccl_choice(os.environ, nics))],
        "ports": port_range(Path("/proc/sys/net/ipv4/ip_local_port_range")),
    }


def port_range(path: Path) -> list[int] | None:
    """Return the first and the last port of the kernel's ephemeral range; None if it cannot be read."""
    try:
        first, last = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return [int(first), int(last)]


def routes(addresses: dict[int, str]) -> dict[int, Details]:
    """Return the route to each of the other hosts: destination address, interface and gateway."""
    table = Path("/proc/self/net/route").read_text(encoding="ascii")
    result = {}
    for host, address in addresses.items():
        way = None if ":" in address else network.route_to(address, table)
        inner = network.is_local(address)
        result[host] = {
            "to": address,
            "interface": "lo" if inner else way.interface if way else None,
            "gateway": way.gateway if way and not inner else None,
        }
    return result


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
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    return match[1] if match else platform.system()


def driver_version(text: str) -> str | None:
    """Return the version of the NVIDIA kernel driver, also if torch cannot use the driver; None without a driver."""
    match = re.search(r"Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else None


def nccl_version() -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def available_memory(meminfo: str) -> float | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return float(match[1]) * 1024 if match else None


def rdma_devices(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def _shared_memory() -> float | None:
    try:
        result = os.statvfs("/dev/shm")
    except OSError:
        return None
    return float(result.f_blocks * result.f_frsize)


def _soft(number: int) -> int | None:
    value = resource.getrlimit(number)[0]
    return None if value == resource.RLIM_INFINITY else value


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# The device of a rank; its speed is measured as ``echelon bench`` does


def device_of(place: RankInfo) -> torch.device:
    """Return the device that ``echelon.init`` would choose."""
    return choose_device(place, None, count_gpus())


def device_details(place: RankInfo) -> Details:
    device = device_of(place)
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    result: Details = {"device": "CPU", "threads": torch.get_num_threads(), "affinity": ranges(allowed)}
    if device.type != "cuda":
        return result
    free, total = torch.cuda.mem_get_info(device)
    details = torch.cuda.get_device_properties(device)
    return result | {
        "device": details.name,
        "index": device.index,
        "memory": total,
        "free_memory": free,
        "capability": f"{details.major}.{details.minor}",
    }


def ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges: ``0-3,8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def device_speeds(place: RankInfo) -> Details:
    """Measure FLOP/s of a large matrix product and memory bytes/s, on all ranks at the same time, as in training."""
    device = device_of(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread, and CUDA events are recorded on it
    clock = DeviceTimer(device, 0.04 if device.type == "cuda" else 0.1)
    side = _GPU_SIDE if clock.on_gpu else _CPU_SIDE
    stream = stream_row(clock, _GPU_STREAM if clock.on_gpu else _CPU_STREAM)
    result: Details = {"memory": stream["bytes"] / stream["seconds"]}
    for dtype in ("float32", "bfloat16"):
        row = product_row(clock, dtype, (1, side, side, side))
        result[dtype] = row["flops"] / row["seconds"]
    return result


# Removal of private data


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect computation or communication of ranks, with secrets masked."""
    shown = (name for name in env if name.startswith(_SHOWN) or name.upper() in _PROXIES)
    shown = (name for name in shown if name not in _OURS)
    return {name: masked(name, env[name]) for name in sorted(shown)}


def masked(name: str, value: str) -> str:
    if any(word in name.upper() for word in _SECRET):
        return MASK
    return without_home(_PASSWORD.sub(f"://{MASK}@", value))


def without_home(text: str) -> str:
    """Replace the home directory, which contains the user's name, by ``~``."""
    home = os.environ.get("HOME") or str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
