"""Communication between replicas in a step, and the part of it that does not overlap with computation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.plan.draft import Draft
from echelon.planner.cluster.cluster import Device, Link
from echelon.planner.cost.collective_costs import CommGroup, seconds
from echelon.planner.cost.compute import stream_seconds
from echelon.planner.cost.system import System

WIRE_BYTES = 2.0
LOCAL_STEPS = 8  # updates between two averages, the default of Strategy(localsgd=...)
KEPT = 0.001  # fraction of the entries that DGC sends after warm-up
TOP_K_PASSES = 10  # number of times that top-k selection reads or writes each entry
ROW = 8  # bytes of an entry that DGC sends: its index and its value


@dataclass(frozen=True)
class StageParameterCounts:
    """Numbers of trained and frozen parameter entries on one rank of a stage, and of the units that have any."""

    trained: float
    frozen: float = 0.0
    units: float = 0.0


@dataclass(frozen=True)
class OverlapWindow:
    """Seconds of computation that can overlap with communication: those of one forward and of one backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class ExposedTraffic:
    """Seconds of communication between replicas that do not overlap with computation.

    gradients:     seconds after the last backward
    each_backward: seconds of gradient communication for each micro-batch
    each_gather:   seconds of parameter gathering for each micro-batch, forward and backward together
    parameters:    seconds after the update
    """

    gradients: float = 0.0
    each_backward: float = 0.0
    each_gather: float = 0.0
    parameters: float = 0.0


def find_exposed_traffic(
    draft: Draft,
    held: StageParameterCounts,
    busy: OverlapWindow,
    group: CommGroup,
    device: Device,
    system: System,
    across: CommGroup | None = None,
) -> ExposedTraffic:
    """Return the exposed communication between the replicas of a stage.

    group:  the replicas, or those that share training state
    across: the replicas with the same part of the state, which sum it after each reduce-scatter; default: none
    """
    if group.ranks == 1:
        return ExposedTraffic()
    width = system.reduced or system.gradient_bytes(draft.amp)
    size = held.trained * (min(width, WIRE_BYTES) if draft.comm_dtype else width)
    if draft.approximate == "dgc":
        return ExposedTraffic(gradients=_compressed(held, group, device))
    if draft.approximate == "localsgd":
        return ExposedTraffic(gradients=seconds("all_reduce", size, group) / LOCAL_STEPS)
    busy = _with_other_chunks(draft, busy) if system.overlaps_chunks else busy
    summed, scattered, gathered = (stream_seconds(held.trained * copied, device) for copied in system.copied)
    if draft.shard == 0:
        return ExposedTraffic(gradients=summed + _behind("all_reduce", size, busy.backward, group, system))
    scattering = scattered + _behind("reduce_scatter", size, busy.backward, group, system, across)
    last, each = (0.0, scattering) if draft.shard >= 2 else (scattering, 0.0)
    if draft.shard < 3:
        whole = held.trained * (system.amp_weights if draft.amp else system.weights)
        gathering = seconds("all_gather", whole, group) - system.parameter_overlap * _link(group).overlap * busy.forward
        parameters = gathered + max(0.0, gathering)
        return ExposedTraffic(gradients=last, each_backward=each, parameters=parameters)
    entries = held.trained + held.frozen
    gathering = seconds("all_gather", entries * (system.gathered or system.weights), group)
    hidden = system.prefetch * _link(group).overlap
    gathers = max(0.0, gathering - hidden * busy.forward) + max(0.0, gathering - hidden * busy.backward)
    on_host = 2 * (gathered + held.units * (group.skew + device.engine.get("unit", system.unit)))
    return ExposedTraffic(each_backward=each, each_gather=gathers + on_host)


def _with_other_chunks(draft: Draft, busy: OverlapWindow) -> OverlapWindow:
    """Return the window of an interleaved pipeline.

    After the last micro-batch of one stage, the rank runs ``draft.stage`` micro-batches of each of its other stages.
    """
    micros = min(draft.stage, draft.micro_batches)
    times = 1 + micros * (draft.chunks - 1) / draft.chunks
    return OverlapWindow(busy.forward * times, busy.backward * times)


def _behind(
    kind: str, size: float, backward: float, group: CommGroup, system: System, across: CommGroup | None = None
) -> float:
    """Return the exposed seconds of bucketed communication that starts with backward: at least those of one bucket.

    across: ranks that then sum their parts of each bucket, while the next bucket is on its way
    """
    if system.overlap == 0.0:
        return seconds(kind, size, group) + _summed(size, group, across)
    buckets = max(1, math.ceil(size / system.bucket))
    first, then = group.skew + seconds(kind, size / buckets, group), _summed(size / buckets, group, across)
    window = backward * system.overlap * min(_link(each).overlap for each in (group, across or group))
    return max(first + then, first + then + (buckets - 1) * max(first, then) - window)


def _summed(size: float, group: CommGroup, across: CommGroup | None) -> float:
    return across.skew + seconds("all_reduce", size / group.ranks, across) if across else 0.0


def _compressed(held: StageParameterCounts, group: CommGroup, device: Device) -> float:
    choosing = held.trained * 4 * TOP_K_PASSES / device.bandwidth
    return choosing + seconds("all_gather", held.trained * KEPT * ROW * group.ranks, group)


def _link(group: CommGroup) -> Link:
    return group.inside if group.hosts == 1 else group.network
