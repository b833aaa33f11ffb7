"""What replicas exchange in a step, and how much of it computing does not hide."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Device, Link
from echelon.planner.cost.collective_costs import CommGroup, seconds
from echelon.planner.cost.compute import stream_seconds
from echelon.planner.cost.system import System

WIRE_BYTES = 2.0
LOCAL_STEPS = 8  # updates between two averages, as Strategy(localsgd=...) has them at first
KEPT = 0.001  # part of the entries that DGC sends, once it has warmed up
TOP_K_PASSES = 10  # times that choosing the largest entries reads or writes each of them
ROW = 8  # bytes of an entry that DGC sends: its place and its value


@dataclass(frozen=True)
class StageParameterCounts:
    """What one rank of a stage holds: entries that are trained, and that are not, and the units they are in."""

    trained: float
    frozen: float = 0.0
    units: float = 0.0


@dataclass(frozen=True)
class OverlapWindow:
    """Seconds of computing that an exchange can hide behind: one forward, one backward, the last backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class ExposedTraffic:
    """gradients: after the last backward; passes: for each micro-batch, of gradients and of parameters (by pass);
    parameters: after the update"""

    gradients: float = 0.0
    each_backward: float = 0.0
    each_gather: float = 0.0
    parameters: float = 0.0


def find_exposed_traffic(
    draft: Draft, held: StageParameterCounts, busy: OverlapWindow, group: CommGroup, device: Device, system: System
) -> ExposedTraffic:
    """What a stage's replicas wait for each other."""
    if group.ranks == 1:
        return ExposedTraffic()
    width = system.reduced or system.gradient_bytes(draft.amp)
    size = held.trained * (min(width, WIRE_BYTES) if draft.wire else width)
    if draft.approximate == "dgc":
        return ExposedTraffic(gradients=_compressed(held, group, device))
    if draft.approximate == "localsgd":
        return ExposedTraffic(gradients=seconds("all_reduce", size, group) / LOCAL_STEPS)
    summed, scattered, gathered = (stream_seconds(held.trained * copied, device) for copied in system.copied)
    if draft.shard == 0:
        return ExposedTraffic(gradients=summed + _behind("all_reduce", size, busy.backward, group, system))
    scattering = scattered + _behind("reduce_scatter", size, busy.backward, group, system)
    last, each = (0.0, scattering) if draft.shard >= 2 else (scattering, 0.0)
    if draft.shard < 3:
        whole = held.trained * (system.amp_weights if draft.amp else system.weights)
        parameters = gathered + seconds("all_gather", whole, group)
        return ExposedTraffic(gradients=last, each_backward=each, parameters=parameters)
    entries = held.trained + held.frozen
    gathering = seconds("all_gather", entries * (system.gathered or system.weights), group)
    hidden = system.prefetch * _link(group).overlap
    gathers = max(0.0, gathering - hidden * busy.forward) + max(0.0, gathering - hidden * busy.backward)
    on_host = 2 * (gathered + held.units * (group.skew + device.engine.get("unit", system.unit)))
    return ExposedTraffic(each_backward=each, each_gather=gathers + on_host)


def _behind(kind: str, size: float, backward: float, group: CommGroup, system: System) -> float:
    """What is left of an exchange in buckets that begins with backward: its last bucket at least."""
    if system.overlap == 0.0:
        return seconds(kind, size, group)
    buckets = max(1, math.ceil(size / system.bucket))
    one = group.skew + seconds(kind, size / buckets, group)
    return max(one, buckets * one - backward * system.overlap * _link(group).overlap)


def _compressed(held: StageParameterCounts, group: CommGroup, device: Device) -> float:
    choosing = held.trained * 4 * TOP_K_PASSES / device.bandwidth
    return choosing + seconds("all_gather", held.trained * KEPT * ROW * group.ranks, group)


def _link(group: CommGroup) -> Link:
    return group.inside if group.hosts == 1 else group.network
