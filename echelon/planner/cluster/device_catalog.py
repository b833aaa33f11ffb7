"""The device catalog: default figures of devices, used until they are measured. Peaks are dense, without sparsity.

The sources are the vendors' data sheets, named at each entry. Memory is what the driver reports, less RESERVE.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from echelon.base.errors import UsageError
from echelon.planner.cluster.cluster import Curve, Device, Link

GIB = 1024.0**3
#: Bytes of a GPU that are not available to training: CUDA context, cuBLAS and cuDNN workspaces, NCCL buffers.
RESERVE = 1.0 * GIB
#: One-way bytes/s of 16 lanes that copies reach: 15.75, 31.5 and 63 GB/s (PCI-SIG), less a fifth for packet overhead.
PCIE3, PCIE4, PCIE5 = 12.5e9, 25e9, 50e9
GIGABIT = 1e9 / 8
#: Latency in seconds from one device to another: inside a host (NCCL over NVLink, PCIe), over RDMA, over TCP.
NVLINK_LATENCY, PCIE_LATENCY, RDMA_LATENCY, TCP_LATENCY = 3e-6, 6e-6, 8e-6, 30e-6

#: Shape of the catalog's curves for products: fractions of the peak that a GPU of 312 TFLOP/s (A100) reaches.
#: The sizes scale with a GPU's peak, because a GPU that is twice as fast needs twice the work to fill it.
_A100_PEAK = 312e12
_PRODUCTS: Curve = ((1e6, 0.02), (1e8, 0.25), (1e10, 0.7), (1e12, 0.8))
_CPU_PRODUCTS: Curve = ((1e4, 0.05), (1e6, 0.5), (1e8, 0.85), (1e10, 0.9))
_CPU_STREAMS: Curve = ((1e3, 0.2), (1e5, 1.0), (1e8, 1.0))


@dataclass(frozen=True)
class DeviceSpec:
    """A device with its usual links: the link inside a host, and one host's network."""

    device: Device
    link: Link
    network: Link


def _tera(**peaks: float) -> dict[str, float]:
    return {dtype: flops * 1e12 for dtype, flops in peaks.items()}


def _gpu(
    name: str,
    peak: dict[str, float],
    memory_gib: float,
    bandwidth: float,
    link: Link,
    network: Link,
    cores: int,
    top: float = 0.8,
) -> DeviceSpec:
    """Build the spec of a GPU.

    cores: number of multiprocessors
    top:   fraction of the peak that large products reach, limited by power, heat or clocks; default 0.8
    """
    scale = max(flops for dtype, flops in peak.items() if dtype != "float8") / _A100_PEAK
    products = tuple((size * scale, part * top / 0.8) for size, part in _PRODUCTS)
    memory = memory_gib * GIB - RESERVE
    return DeviceSpec(Device(name, peak, memory, bandwidth, products=products, cores=cores), link, network)


def _network(gigabits: float, ports: int = 1) -> Link:
    """Build a host's network link from all its ports. Ports of 100 Gb/s or more are assumed to use RDMA, others TCP."""
    words = f"{ports}x{gigabits:g}" if ports > 1 else f"{gigabits:g}"
    latency = RDMA_LATENCY if gigabits >= 100 else TCP_LATENCY
    return Link(f"{words} Gb/s a host", ports * gigabits * GIGABIT, latency, rails=ports)


def _nvlink(bandwidth: float) -> Link:
    return Link("NVLink", bandwidth, NVLINK_LATENCY)


def _pcie(bandwidth: float) -> Link:
    return Link("PCIe", bandwidth, PCIE_LATENCY)


def _cpu(name: str, cores: int, latency: float) -> DeviceSpec:
    """Build the spec of a CPU with ``cores`` cores and Gloo over loopback.

    Each core is assumed to do 32 FLOPs per cycle (two 256-bit FMA units) at 2.6 GHz, and to have 6 GB/s of a socket's
    200 GB/s.
    """
    device = Device(
        name=name,
        peak={"float32": cores * 32 * 2.6e9},
        memory=cores * 4 * GIB,
        bandwidth=cores * 6e9,
        launch=4e-6,
        floor=4e-6,
        products=tuple((size * cores, part) for size, part in _CPU_PRODUCTS),
        streams=tuple((size * cores, part) for size, part in _CPU_STREAMS),
        attention=0.4,
        update=0.8,
    )
    return DeviceSpec(
        device, Link("Gloo", 1.2e9, latency, overlap=0.3), Link("10 Gb/s a host", 10 * GIGABIT, 60e-6, overlap=0.5)
    )


_A100_FLOPS = _tera(float32=19.5, tf32=156, bfloat16=312, float16=312)
_H100_FLOPS = _tera(float32=67, tf32=494.7, bfloat16=989.4, float16=989.4, float8=1978.9)
_KINDS = (
    # Tesla P100 SXM2 data sheet (2016); NVLink 1: 4 x 20 GB/s each way. Cloud hosts of that time: 25 Gb/s.
    _gpu(
        "P100",
        _tera(float32=10.6, float16=21.2),
        memory_gib=15.9,
        bandwidth=732e9,
        link=_nvlink(80e9),
        network=_network(25),
        cores=56,
        top=0.9,
    ),
    # Tesla V100 SXM2 data sheet; NVLink 2: 6 x 25 GB/s each way. Hosts as AWS p3dn: 100 Gb/s.
    _gpu(
        "V100",
        _tera(float32=15.7, float16=125),
        memory_gib=15.8,
        bandwidth=900e9,
        link=_nvlink(150e9),
        network=_network(100),
        cores=80,
    ),
    _gpu(
        "V100-32",
        _tera(float32=15.7, float16=125),
        memory_gib=31.7,
        bandwidth=900e9,
        link=_nvlink(150e9),
        network=_network(100),
        cores=80,
    ),
    # T4 data sheet (long products hit the power limit of 70 W); PCIe 3 x16. Hosts as AWS g4dn.12xlarge: 50 Gb/s.
    _gpu(
        "T4",
        _tera(float32=8.1, float16=65),
        memory_gib=14.7,
        bandwidth=320e9,
        link=_pcie(PCIE3),
        network=_network(50),
        cores=40,
        top=0.5,
    ),
    # A10 data sheet; PCIe 4 x16. Hosts as AWS g5.48xlarge: 100 Gb/s.
    _gpu(
        "A10",
        _tera(float32=31.2, tf32=62.5, bfloat16=125, float16=125),
        memory_gib=22.5,
        bandwidth=600e9,
        link=_pcie(PCIE4),
        network=_network(100),
        cores=72,
        top=0.7,
    ),
    # L4 data sheet, half of the figures with sparsity; PCIe 4 x16. Hosts as AWS g6.48xlarge: 100 Gb/s.
    _gpu(
        "L4",
        _tera(float32=30.3, tf32=60, bfloat16=121, float16=121, float8=242),
        memory_gib=22.2,
        bandwidth=300e9,
        link=_pcie(PCIE4),
        network=_network(100),
        cores=58,
        top=0.6,
    ),
    # A100 data sheet, SXM4; NVLink 3: 12 x 25 GB/s each way. DGX A100: 8 x 200 Gb/s for data.
    _gpu(
        "A100-40",
        _A100_FLOPS,
        memory_gib=39.4,
        bandwidth=1555e9,
        link=_nvlink(300e9),
        network=_network(200, 8),
        cores=108,
    ),
    _gpu(
        "A100",
        _A100_FLOPS,
        memory_gib=79.2,
        bandwidth=2039e9,
        link=_nvlink(300e9),
        network=_network(200, 8),
        cores=108,
    ),
    # H100 data sheet, SXM5, half of the figures with sparsity; NVLink 4: 450 GB/s each way. DGX H100: 8 x 400 Gb/s.
    _gpu(
        "H100",
        _H100_FLOPS,
        memory_gib=79.1,
        bandwidth=3350e9,
        link=_nvlink(450e9),
        network=_network(400, 8),
        cores=132,
        top=0.7,
    ),
    # H100 data sheet, PCIe; without NVLink bridges: PCIe 5 x16. Hosts: 8 x 200 Gb/s.
    _gpu(
        "H100-PCIe",
        _tera(float32=51, tf32=378, bfloat16=756, float16=756, float8=1513),
        memory_gib=79.1,
        bandwidth=2000e9,
        link=_pcie(PCIE5),
        network=_network(200, 8),
        cores=114,
        top=0.6,
    ),
    # H200 data sheet, SXM; peaks of the H100, at higher clocks (0.81 of the peak measured). DGX H200: 8 x 400 Gb/s.
    _gpu(
        "H200",
        _H100_FLOPS,
        memory_gib=139.8,
        bandwidth=4800e9,
        link=_nvlink(450e9),
        network=_network(400, 8),
        cores=132,
        top=0.8,
    ),
    # HGX B200 data sheet, an eighth of an 8-GPU host, half of the figures with sparsity; NVLink 5: 900 GB/s each way.
    _gpu(
        "B200",
        _tera(float32=75, tf32=1125, bfloat16=2250, float16=2250, float8=4500),
        memory_gib=178.4,
        bandwidth=7700e9,
        link=_nvlink(900e9),
        network=_network(400, 8),
        cores=148,
        top=0.7,
    ),
    # Ada white paper: 16 bits with float32 accumulation, no sparsity; PCIe 4 x16, no peer copies. Usual hosts: 25 Gb/s.
    _gpu(
        "RTX4090",
        _tera(float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
        memory_gib=23.6,
        bandwidth=1008e9,
        link=_pcie(PCIE4 / 2),
        network=_network(25),
        cores=128,
        top=0.85,
    ),
    # One core, for jobs with one rank per core; a socket of 32 cores, for one rank that uses all threads.
    _cpu("CPU", 1, 60e-6),
    _cpu("CPU-socket", 32, 60e-6),
)

CATALOGUE: dict[str, DeviceSpec] = {kind.device.name: kind for kind in _KINDS}

#: Other spellings of a name, those of drivers included, after ``normalize_device_name``.
_ALIASES = {
    "P100": "p10016 p10016gb p100sxm2 p100sxm216gb p100pcie p100pcie16gb",
    "V100": "v10016 v10016gb v100sxm2 v100sxm216gb v100pcie v100pcie16gb",
    "V100-32": "v10032gb v100sxm232gb v100sxm3 v100sxm332gb v100pcie32gb",
    "A10": "a10g a1024gb",
    "A100-40": "a10040gb a100sxm440gb a100pcie40gb",
    "A100": "a10080 a10080gb a100sxm a100sxm4 a100sxm480gb a100pcie80gb a10080gbpcie",
    "H100": "h10080 h10080gb h100sxm h100sxm5 h10080gbhbm3 h100sxm80gb",
    "H100-PCIe": "h10080gbpcie h100nvl",
    "H200": "h200sxm h200141 h200141gb h200nvl",
    "B200": "b200sxm b200180gb b200192gb",
    "RTX4090": "4090 geforcertx4090",
    "CPU": "cpucore core",
    "CPU-socket": "socket",
}


def normalize_device_name(name: str) -> str:
    """Return the name in a form for comparison: ``"NVIDIA H100 80GB HBM3"`` and ``"h100-80gb-hbm3"`` become equal."""
    return re.sub(r"nvidia|tesla|[^a-z0-9]", "", name.lower())


_BY_WORD = {normalize_device_name(name): name for name in CATALOGUE}
_BY_WORD |= {word: name for name, words in _ALIASES.items() for word in words.split()}


def find_kind(name: str) -> DeviceSpec | None:
    """Return the catalog's entry for a name as users or drivers write it, or None."""
    found = _BY_WORD.get(normalize_device_name(name))
    return CATALOGUE[found] if found else None


def kind_named(name: str, where: str = "") -> DeviceSpec:
    kind = find_kind(name)
    if kind is None:
        close = difflib.get_close_matches(normalize_device_name(name), _BY_WORD, n=1, cutoff=0.7)
        hint = f"; did you mean '{_BY_WORD[close[0]]}'?" if close else f"; known: {', '.join(CATALOGUE)}"
        raise UsageError(f"{where}there is no device '{name}' in the catalogue{hint}")
    return kind


def device_named(name: str) -> Device:
    return kind_named(name).device
