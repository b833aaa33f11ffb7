"""Compute times (a roofline model): each kernel takes the time of its FLOPs or of its bytes, whichever is longer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from echelon.planner.cluster.cluster import Curve, Device, read_curve
from echelon.planner.cost.system import System
from echelon.planner.model_costs import FUSABLE, Kernel, ModelUnit, UnitPass

COMPUTES = frozenset({"product", "convolution", "attention"})

#: Tiles that a library divides a product's result into (rows, columns), and the fraction of a multiprocessor's rate
#: that each reaches: small tiles read more of their operands for each multiplication.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))


#: How a unit is compiled: its kernels are those of compiled code, or the system's factors stand for fusion.
Compiling = Literal["fused", "by factors"]


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of one micro-batch in one unit, without collectives, which depend on the placement of ranks.

    forward, backward:           seconds of the device
    for_weights:                 part of ``backward`` that a schedule may defer
    forward_host, backward_host: seconds of the host to launch the kernels; the host runs ahead of the device
    replay, replay_host:         seconds of the device and of the host for recompute
    """

    forward: float
    backward: float
    for_weights: float
    forward_host: float
    backward_host: float
    replay: float = 0.0
    replay_host: float = 0.0

    def __add__(self, other: UnitSeconds) -> UnitSeconds:
        return UnitSeconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def unit_seconds(unit: ModelUnit, device: Device, system: System, compiled: Compiling | None = None) -> UnitSeconds:
    """Return the seconds of one micro-batch in one unit.

    compiled: how the unit is compiled; None: not compiled
    """
    pace = _Pace(device, system, compiled)
    forward, backward, again = unit.forward.kernels, unit.backward.kernels, unit.again or unit.forward
    return UnitSeconds(
        forward=pace.device(forward),
        backward=pace.device(backward),
        for_weights=pace.device(kernel for kernel in backward if kernel.for_weights),
        forward_host=pace.host(unit.forward),
        backward_host=pace.host(unit.backward),
        replay=pace.device(again.kernels),
        replay_host=pace.host(again) + pace.started(_batch_norms(again) * system.puts_back),
    )


def _batch_norms(way: UnitPass) -> int:
    return sum(kernel.count for kernel in way.kernels if kernel.kind == "batch_norm")


class _Pace:
    """The speed of one device under one system."""

    def __init__(self, device: Device, system: System, compiled: Compiling | None) -> None:
        by_factors, fused = compiled == "by factors", compiled == "fused"
        self._kind, self._gap = device, device.floor if fused and not device.overhead else 0.0
        self._fused = system.pointwise * (system.compiled_pointwise if by_factors else 1.0)
        self._launch = device.launch * system.host * (system.compiled_host if fused else 1.0)
        self._launches = system.launches * (system.compiled_launches if by_factors else 1.0)

    def device(self, kernels: Iterable[Kernel]) -> float:
        """Return the seconds of the device for the kernels in sequence."""
        return sum(kernel.count * self._one(kernel) for kernel in kernels)

    def host(self, way: UnitPass) -> float:
        """Return the seconds of the host to launch the kernels; the host runs ahead of the device."""
        return self.started(way.launches)

    def started(self, launches: float) -> float:
        return launches * self._launches * self._launch

    def _one(self, kernel: Kernel) -> float:
        return self._gap + kernel_seconds(kernel, self._kind, self._fused if kernel.kind in FUSABLE else 1.0)


def kernel_seconds(kernel: Kernel, device: Device, fused: float = 1.0) -> float:
    """Return the seconds of one launch.

    fused: fraction of the kernel's bytes that remains if the kernel is fused with its neighbors; default 1
    """
    moving = stream_seconds(_moved(kernel, device) * fused, device) / kind_part(kernel, device)
    computing = kernel.flops / _rate(kernel, device) if kernel.kind in COMPUTES and kernel.flops else 0.0
    if len(kernel.shape) == 1:
        computing = kernel.shape[0] * device.function
    return device.training * (device.overhead * fused + max(device.floor * fused, moving, computing))


def stream_seconds(moved: float, device: Device) -> float:
    """Return the seconds of a kernel that reads and writes ``moved`` bytes, a third of them to new memory."""
    return moved / (device.bandwidth * read_curve(device.streams, moved)) if moved else 0.0


def _moved(kernel: Kernel, device: Device) -> float:
    """Return the bytes that the kernel moves.

    On a CPU, a product counts at least 12 bytes per entry of its result, as an addition of two tensors does, because
    the operating system provides the memory of a large result page by page.
    """
    if not device.overhead or kernel.kind != "product" or len(kernel.shape) != 4:
        return kernel.bytes
    batch, m, n, _ = kernel.shape
    return max(kernel.bytes, 12 * batch * m * n)


def _rate(kernel: Kernel, device: Device) -> float:
    """Return the FLOP/s that the kernel reaches."""
    peak = device.peak_of(kernel.dtype)
    if kernel.kind == "attention":
        _, _, keys, width, causal = kernel.shape if len(kernel.shape) == 5 else (0, 0, 1e6, 1, 0)
        return peak * device.attention_of(kernel.dtype, keys * width, bool(causal))
    if kernel.kind == "convolution" and device.convolutions:
        return peak * read_curve(device.convolutions_of(kernel.dtype, sort_of(kernel.shape)), kernel.flops)
    whole = peak * read_curve(device.products_of(kernel.dtype), kernel.flops)
    shape = kernel.shape[:4]
    return whole * tile_part(shape, device.cores) * thin_part(shape, device.thin)


def kind_part(kernel: Kernel, device: Device) -> float:
    """Return the fraction of the streaming bandwidth that a kernel of this kind reaches."""
    curve = device.batch_norms_by.get(kernel.dtype) if kernel.kind == "batch_norm" else None
    if curve and len(kernel.shape) == 2:
        return read_curve(curve, kernel.shape[1])
    return device.parts.get(f"{kernel.kind} {kernel.dtype}", 1.0)


LEAST_SPLIT = 512  # entries of k in each part of a product that is split along k

FEW_CHANNELS = 8  # with fewer input channels, matrix units are poorly used


def sort_of(shape: tuple[float, ...]) -> str:
    """Return the sort of a convolution ("depthwise", "few", "1x1" or ""); those of one sort reach similar rates."""
    if len(shape) != 5:
        return ""
    if shape[0] > 1 and shape[4] == 1:
        return "depthwise"
    return "few" if shape[4] < FEW_CHANNELS else "1x1" if shape[3] == shape[4] else ""


def thin_part(shape: tuple[float, ...], thin: Curve) -> float:
    """Return the fraction of its rate that a product of (batch, m, n, k) keeps; thin products are bound by reading."""
    return read_curve(thin, min(shape[1:])) if thin and len(shape) == 4 else 1.0


def tile_part(shape: tuple[float, ...], cores: int) -> float:
    """Return the fraction of its rate that a product of (batch, m, n, k) keeps after tile and wave quantization."""
    if len(shape) != 4 or not cores:
        return 1.0
    batch, m, n, k = shape
    return max(rate * _filled((batch, m, n, k), rows, columns, cores) for rows, columns, rate in TILES)


def _filled(shape: tuple[float, ...], rows: int, columns: int, cores: int) -> float:
    """Return the fraction of the multiprocessors' work that is useful; few tiles are split along a long k."""
    batch, m, n, k = shape
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    splits = max(1.0, min(cores // tiles, k // LEAST_SPLIT))
    return splits * batch * m * n / (math.ceil(splits * tiles / cores) * cores * rows * columns)
