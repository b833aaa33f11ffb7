"""Costs of a model's units as a runtime computes them: sequence parallelism, and products in another dtype.

A profile has the kernels of this runtime's split layers. Between split layers every rank of a split computes the same
values; with sequence parallelism each rank computes its part of the sequence, and the all-reduce after a split layer is
a reduce-scatter there and an all-gather before the next one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from echelon.planner.cost.system import System
from echelon.planner.model_costs import Kernel, ModelCosts, ModelUnit, SplitCollective, UnitPass

SEQUENCE_WISE = frozenset({"pointwise", "normalization", "reduction", "copy", "lookup"})
RESIDUAL = 3.1  # times the bytes of a hidden state, which the addition of two reads and writes
ALIGNED = 8  # entries of 16 bits to which matrix units want sizes to be aligned


def is_changed(system: System, split: int) -> bool:
    """Return True if the runtime computes units otherwise than the profile."""
    along = split > 1 and (system.sequence_split or system.fused_ends)
    return along or system.product_dtype is not None or system.unaligned != 1.0 or system.residual != 1.0


def run_by(system: System, sheet: ModelCosts, whole: ModelCosts) -> ModelCosts:
    """Return the costs under the system.

    sheet: costs of a profile
    whole: costs of the same profile without a split
    """
    times = Counter(map(id, sheet.units))
    changes = {alone: _changes(system, sheet.split, alone) for alone in (True, False)}
    made = {
        id(unit): _unit(unit, unsplit, changes[times[id(unit)] == 1])
        for unit, unsplit in zip(sheet.units, whole.units, strict=True)
    }
    return dataclasses.replace(sheet, units=tuple(made[id(unit)] for unit in sheet.units))


@dataclass(frozen=True)
class _UnitChanges:
    """Differences between a unit's profile and what the runtime computes.

    parts:     number of parts of which a rank computes one between products (1: as profiled)
    scatters:  True if all-reduces are halved into reduce-scatters and all-gathers
    dtype:     dtype of the products of linear layers (None: as profiled)
    unaligned: factor on the FLOPs of products with unaligned sizes
    residual:  factor on the bytes of pointwise kernels of the residual stream
    """

    parts: int
    scatters: bool
    dtype: str | None
    unaligned: float
    residual: float


def _changes(system: System, split: int, alone: bool) -> _UnitChanges:
    """Return the changes of a unit; ``alone``: True for embedding and head, which occur once."""
    parted = system.sequence_split or (alone and system.fused_ends)
    dtype = None if alone else system.product_dtype
    return _UnitChanges(split if parted else 1, system.sequence_split, dtype, system.unaligned, system.residual)


def replayed_unit(unit: ModelUnit, system: System) -> ModelUnit:
    """Return the unit with the kernels that selective recompute runs again, if the system has such."""
    if not system.replayed_kinds:
        return unit
    way, parts = unit.again or unit.forward, system.replayed_kinds
    kernels = (
        dataclasses.replace(kernel, flops=kernel.flops * part, bytes=kernel.bytes * part)
        for kernel in way.kernels
        if (part := parts.get(kernel.kind, 1.0)) > 0
    )
    return dataclasses.replace(unit, again=UnitPass(tuple(kernels), way.messages))


@functools.lru_cache(maxsize=8192)  # equal units stay one object, by whose identity callers cache
def _unit(unit: ModelUnit, unsplit: ModelUnit, changes: _UnitChanges) -> ModelUnit:
    found: dict[str, Any] = {}
    for name in ("forward", "backward", "again"):
        way, whole = getattr(unit, name), getattr(unsplit, name)
        if way is not None and whole is not None:
            parted = _parted(way, whole, changes)
            stream = RESIDUAL * unit.received / changes.parts
            kernels = (_joined(_product(kernel, changes), stream, changes) for kernel in parted.kernels)
            found[name] = UnitPass(tuple(kernels), parted.messages)
    return dataclasses.replace(unit, **found)


def _parted(way: UnitPass, unsplit: UnitPass, changes: _UnitChanges) -> UnitPass:
    """Return a pass in which the kernels between products have a part of the bytes of the unsplit pass."""
    if changes.parts == 1:
        return way
    kept = tuple(kernel for kernel in way.kernels if kernel.kind not in SEQUENCE_WISE)
    parts = tuple(_part(kernel, changes.parts) for kernel in unsplit.kernels if kernel.kind in SEQUENCE_WISE)
    return UnitPass(kept + parts, tuple(_halves(way.messages)) if changes.scatters else way.messages)


def _part(kernel: Kernel, split: int) -> Kernel:
    shape = (kernel.shape[0] / split,) if len(kernel.shape) == 1 else kernel.shape
    return dataclasses.replace(kernel, flops=kernel.flops / split, bytes=kernel.bytes / split, shape=shape)


def _halves(messages: Iterable[SplitCollective]) -> Iterable[SplitCollective]:
    for message in messages:
        if message.kind == "all_reduce":
            yield SplitCollective("reduce_scatter", message.bytes, message.count)
            yield SplitCollective("all_gather", message.bytes, message.count)
        else:
            yield message


def _joined(kernel: Kernel, stream: float, changes: _UnitChanges) -> Kernel:
    """Return the kernel with the bytes that remain if pointwise kernels of the residual stream are joined."""
    if changes.residual == 1.0 or kernel.kind not in ("pointwise", "copy") or kernel.bytes > stream:
        return kernel
    return dataclasses.replace(kernel, bytes=kernel.bytes * changes.residual)


def _product(kernel: Kernel, changes: _UnitChanges) -> Kernel:
    if kernel.kind != "product" or len(kernel.shape) != 4:
        return kernel
    if changes.unaligned != 1.0 and any(size % ALIGNED for size in kernel.shape[1:]):
        kernel = dataclasses.replace(kernel, flops=kernel.flops * changes.unaligned)
    linear = kernel.shape[0] == 1  # the products of attention are batched
    return dataclasses.replace(kernel, dtype=changes.dtype) if changes.dtype and linear else kernel
