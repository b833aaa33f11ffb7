"""Costs of a model's stages: sums over units, computed as differences of cached running sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.planner.cluster.cluster import Device
from echelon.planner.cost.collective_costs import CommGroup, seconds
from echelon.planner.cost.compute import Compiling, UnitSeconds, stream_seconds, unit_seconds
from echelon.planner.cost.runtime_units import is_changed, replayed_unit, run_by
from echelon.planner.cost.system import System
from echelon.planner.model_costs import ModelCosts, ModelUnit, ProfileLike, SplitCollective, compiled_view

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunningSums:
    """Running sums over units, as rows: entry i is the sum over the first i units."""

    rows: Array

    def between(self, bounds: Sequence[int]) -> Array:
        """Return the sums by row and stage; stage s has the units from ``bounds[s]`` up to ``bounds[s + 1]``."""
        return np.diff(self.rows[:, list(bounds)], axis=1)


def running(values: Sequence[Sequence[float]]) -> RunningSums:
    """Return the running sums; ``values`` has one row for each unit."""
    table = np.array(values, dtype=float).T
    return RunningSums(np.concatenate([np.zeros((len(table), 1)), np.cumsum(table, axis=1)], axis=1))


@dataclass(frozen=True)
class CostSetting:
    """The parameters, beside placement, that costs depend on.

    samples: samples of a micro-batch; fractions are interpolated
    split:   size of the split axis
    """

    samples: float
    split: int
    amp: str | None
    compiled: bool = False


class UnitCosts:
    """Cached costs of a model's units."""

    def __init__(self, profile: ProfileLike, system: System) -> None:
        self.profile, self.system = profile, system
        self._kept: dict[Hashable, RunningSums] = {}
        self._units: dict[Hashable, UnitSeconds] = {}
        self._sheets: dict[tuple[int, int, str | None, bool], ModelCosts] = {}
        self._compiling: Compiling = "fused" if hasattr(profile, "compiled") else "by factors"

    def sheet(self, samples: int, split: int, amp: str | None, compiled: bool = False) -> ModelCosts:
        """Return the costs of all units; as compiled code, if requested and if the profile knows them."""
        key = samples, split, amp, compiled
        if key not in self._sheets:
            profile = compiled_view(self.profile, compiled)
            found = profile.sheet(samples, split, amp)
            if is_changed(self.system, split):
                found = run_by(self.system, found, profile.sheet(samples, 1, amp))
            self._sheets[key] = found
        return self._sheets[key]

    def share(self, known: dict[Hashable, UnitSeconds]) -> None:
        """Share the cache of unit costs with other instances.

        All instances must have the same devices and system, and their units must live as long as the cache, because the
        cache is keyed by the units' identity.
        """
        self._units = known

    def unit(self, unit: ModelUnit, device: Device, compiled: bool) -> UnitSeconds:
        way = self._compiling if compiled else None
        key = id(unit), device.name, way  # the id stays valid because ``_sheets`` keeps the units alive
        if key not in self._units:
            self._units[key] = unit_seconds(replayed_unit(unit, self.system), device, self.system, way)
        return self._units[key]

    def computing(self, setting: CostSetting, device: Device, group: CommGroup) -> RunningSums:
        """Return the compute seconds of units.

        Rows: forward, backward, weight gradients, forward on the host, backward on the host, recompute, recompute on
        the host. If the host runs ahead only within a unit, its time is at least that of the device and of the
        collectives in ``group``.
        """
        where = device.name, group if self.system.runs_ahead == "unit" else None
        return self._between_samples(
            "computing", setting, where, lambda sheet: self._computing(sheet, setting, device, group)
        )

    def messages(self, setting: CostSetting, group: CommGroup) -> RunningSums:
        """Return the exposed seconds of collectives inside layers; rows: forward, backward, recompute."""
        return self._between_samples("messages", setting, group, lambda sheet: self._messages(sheet, group))

    def message_counts(self, setting: CostSetting) -> RunningSums:
        """Return the number of collectives inside layers; rows: forward, backward, recompute."""

        def of(sheet: ModelCosts) -> RunningSums:
            ways = [[sum(m.count for m in way.messages) for way in (u.forward, u.backward)] for u in sheet.units]
            return running([(there, back, there) for there, back in ways])

        return self._between_samples("message counts", setting, None, of)

    def statistics(self, setting: CostSetting, group: CommGroup) -> RunningSums:
        """Return the seconds to exchange batch norm's statistics; rows: forward, backward."""
        return self._between_samples("statistics", setting, group, lambda sheet: _statistics(sheet, group))

    def sizes(self, setting: CostSetting) -> RunningSums:
        """Return the sizes of parameters; rows: trained entries, frozen entries, bytes, units with parameters."""
        return self._between_samples("sizes", setting, None, _sizes)

    def tied(self, setting: CostSetting) -> tuple[float, ...]:
        """Return the number of entries of shared weights, for each group of units that share one."""
        return self.sheet(_below(setting), setting.split, setting.amp, setting.compiled).tied

    def adding(self, setting: CostSetting, device: Device) -> RunningSums:
        """Return the seconds to accumulate gradients over micro-batches; rows: device, host."""

        def of(sheet: ModelCosts) -> RunningSums:
            return running(
                [
                    (
                        stream_seconds(self.system.added * unit.trained, device),
                        sum(kernel.count for kernel in unit.backward.kernels if kernel.for_weights) * device.launch,
                    )
                    for unit in sheet.units
                ]
            )

        return self._between_samples("adding", setting, device.name, of)

    def received(self, setting: CostSetting) -> Array:
        """Return the bytes that each unit receives."""
        sums = self._between_samples(
            "received", setting, None, lambda s: running([(unit.received,) for unit in s.units])
        )
        return np.diff(sums.rows[0])

    def _between_samples(
        self, what: str, setting: CostSetting, where: Hashable, compute: Callable[[ModelCosts], RunningSums]
    ) -> RunningSums:
        key = what, setting, where
        if key not in self._kept:
            below = _below(setting)
            part = max(0.0, setting.samples - below)
            low = compute(self.sheet(below, setting.split, setting.amp, setting.compiled))
            if part > 1e-9:
                high = compute(self.sheet(below + 1, setting.split, setting.amp, setting.compiled))
                low = RunningSums((1 - part) * low.rows + part * high.rows)
            self._kept[key] = low
        return self._kept[key]

    def _computing(self, sheet: ModelCosts, setting: CostSetting, device: Device, group: CommGroup) -> RunningSums:
        times = _occurrences(sheet)
        rows: dict[int, tuple[float, ...]] = {}
        for unit in sheet.units:
            if id(unit) in rows:
                continue
            cost = self.unit(unit, device, setting.compiled)
            again, host, back_host = self._replayed(times[id(unit)]), cost.forward_host, cost.backward_host
            replay_host = cost.replay_host * (1.0 if device.overhead else self.system.replay_host)
            if self.system.runs_ahead == "unit":
                there, back = self._exposed(unit, group)
                calls = [
                    self.system.collective * sum(m.count for m in way.messages) for way in (unit.forward, unit.backward)
                ]
                host, back_host, replay_host = host + calls[0], back_host + calls[1], replay_host + calls[0]
                host, back_host = max(host, cost.forward + there), max(back_host, cost.backward + back)
                replay_host = max(replay_host, cost.replay + there)
            rows[id(unit)] = (
                cost.forward,
                cost.backward,
                cost.for_weights,
                host,
                back_host,
                again * cost.replay,
                again * replay_host,
            )
        return running([rows[id(unit)] for unit in sheet.units])

    def _replayed(self, times: int) -> float:
        """Return the fraction of a unit's forward that recompute runs again.

        times: number of occurrences of the unit in the model
        """
        return self.system.replayed if self.system.replays == "units" or times > 1 else 0.0

    def _messages(self, sheet: ModelCosts, group: CommGroup) -> RunningSums:
        times = _occurrences(sheet)
        rows: dict[int, tuple[float, float, float]] = {}
        for unit in sheet.units:
            if id(unit) not in rows:
                there, back = self._exposed(unit, group)
                rows[id(unit)] = there, back, self._replayed(times[id(unit)]) * there
        return running([rows[id(unit)] for unit in sheet.units])

    def _exposed(self, unit: ModelUnit, group: CommGroup) -> tuple[float, float]:
        """Return the exposed seconds of collectives inside the unit, in forward and backward."""
        part = 1.0 - self.system.hides_split
        there = sum(message_seconds(message, group) for message in unit.forward.messages)
        back = sum(message_seconds(message, group) for message in unit.backward.messages)
        return part * there, part * back


def _below(setting: CostSetting) -> int:
    return max(1, math.floor(setting.samples))


def _occurrences(sheet: ModelCosts) -> Counter[int]:
    """Count the occurrences of each unit in the model, by identity."""
    return Counter(map(id, sheet.units))


def message_seconds(message: SplitCollective, group: CommGroup) -> float:
    return message.count * (group.skew + seconds(message.kind, message.bytes, group))


def _statistics(sheet: ModelCosts, group: CommGroup) -> RunningSums:
    """Return the seconds to exchange statistics: each layer all-gathers in forward and all-reduces in backward."""

    def of(unit: ModelUnit) -> tuple[float, float]:
        if not unit.norm_statistics or group.ranks == 1:
            return 0.0, 0.0
        layers = max(1, sum(k.count for k in unit.forward.kernels if k.kind in ("normalization", "batch_norm")))
        size = 4 * unit.norm_statistics / layers
        gathered = layers * seconds("gather_small", size * group.ranks, group)
        return gathered, layers * seconds("all_reduce", size, group)

    return running([of(unit) for unit in sheet.units])


def _sizes(sheet: ModelCosts) -> RunningSums:
    return running(
        [(unit.trained, unit.weights - unit.trained, unit.weight_bytes, unit.weights > 0) for unit in sheet.units]
    )
