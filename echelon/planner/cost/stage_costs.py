"""Costs of a model's stages, from costs of its units that are kept: sums over units are differences of running sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.planner.cluster.cluster import Device
from echelon.planner.cost.collective_costs import CommGroup, seconds
from echelon.planner.cost.compute import UnitSeconds, stream_seconds, unit_seconds
from echelon.planner.cost.system import System
from echelon.planner.model_costs import ModelCosts, ModelUnit, ProfileLike, SplitCollective

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunningSums:
    """Running sums over units, as rows: entry i is of the first i units."""

    rows: Array

    def between(self, bounds: Sequence[int]) -> Array:
        """By row and stage, where stage s has the units from ``bounds[s]`` up to ``bounds[s + 1]``."""
        return np.diff(self.rows[:, list(bounds)], axis=1)


def running(values: Sequence[Sequence[float]]) -> RunningSums:
    """``values``: a row for each unit."""
    table = np.array(values, dtype=float).T
    return RunningSums(np.concatenate([np.zeros((len(table), 1)), np.cumsum(table, axis=1)], axis=1))


@dataclass(frozen=True)
class CostSetting:
    """What a sheet's costs depend on besides places: samples (also between whole numbers), parts, numbers' width."""

    samples: float
    split: int
    amp: str | None
    compiled: bool = False


class UnitCosts:
    """Everything about units that predictions ask for, computed once."""

    def __init__(self, profile: ProfileLike, system: System) -> None:
        self.profile, self.system = profile, system
        self._kept: dict[Hashable, RunningSums] = {}
        self._units: dict[Hashable, UnitSeconds] = {}
        self._sheets: dict[tuple[int, int, str | None], ModelCosts] = {}

    def sheet(self, samples: int, split: int, amp: str | None) -> ModelCosts:
        key = samples, split, amp
        if key not in self._sheets:
            self._sheets[key] = self.profile.sheet(samples, split, amp)
        return self._sheets[key]

    def share(self, known: dict[Hashable, UnitSeconds]) -> None:
        """Keep costs of units where others do, whose devices and system are the same and whose units live as long."""
        self._units = known

    def unit(self, unit: ModelUnit, device: Device, compiled: bool) -> UnitSeconds:
        key = id(unit), device.name, compiled  # sheets are kept, and with them the units
        if key not in self._units:
            self._units[key] = unit_seconds(unit, device, self.system, compiled)
        return self._units[key]

    def computing(self, setting: CostSetting, device: Device, group: CommGroup) -> RunningSums:
        """Rows: forward, backward, for weights, forward and backward on the host, replayed, replayed on the host.

        A host that runs ahead within a unit only takes as long as the device and the messages in ``group`` at least.
        """
        where = device.name, group if self.system.runs_ahead == "unit" else None
        return self._between_samples(
            "computing", setting, where, lambda sheet: self._computing(sheet, setting, device, group)
        )

    def messages(self, setting: CostSetting, group: CommGroup) -> RunningSums:
        """Rows: seconds inside layers, exposed, in forward, backward and replay."""
        return self._between_samples("messages", setting, group, lambda sheet: self._messages(sheet, group))

    def message_counts(self, setting: CostSetting) -> RunningSums:
        """Rows: how many there are inside layers in forward, backward and replay."""

        def of(sheet: ModelCosts) -> RunningSums:
            ways = [[sum(m.count for m in way.messages) for way in (u.forward, u.backward)] for u in sheet.units]
            return running([(there, back, there) for there, back in ways])

        return self._between_samples("message counts", setting, None, of)

    def statistics(self, setting: CostSetting, group: CommGroup) -> RunningSums:
        """Rows: seconds for batch norm's statistics in forward and backward."""
        return self._between_samples("statistics", setting, group, lambda sheet: _statistics(sheet, group))

    def sizes(self, setting: CostSetting) -> RunningSums:
        """Rows: entries that are trained, entries that are not, bytes of weights, units that have any."""
        return self._between_samples("sizes", setting, None, _sizes)

    def tied(self, setting: CostSetting) -> tuple[float, ...]:
        """Entries that units share, for each group of them."""
        return self.sheet(_below(setting), setting.split, setting.amp).tied

    def adding(self, setting: CostSetting, device: Device) -> RunningSums:
        """Rows: seconds to add gradients to those of earlier micro-batches, and of the host to start that."""

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
        """Bytes that come into each unit."""
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
            low = compute(self.sheet(below, setting.split, setting.amp))
            if part > 1e-9:
                high = compute(self.sheet(below + 1, setting.split, setting.amp))
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
        """Part of a unit's forward that recompute runs again; ``times``: how often the model has such a unit."""
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
        """Seconds of messages inside the unit that nothing hides, in forward and backward."""
        part = 1.0 - self.system.hides_split
        there = sum(message_seconds(message, group) for message in unit.forward.messages)
        back = sum(message_seconds(message, group) for message in unit.backward.messages)
        return part * there, part * back


def _below(setting: CostSetting) -> int:
    return max(1, math.floor(setting.samples))


def _occurrences(sheet: ModelCosts) -> Counter[int]:
    """How often the model has each unit, by identity."""
    return Counter(map(id, sheet.units))


def message_seconds(message: SplitCollective, group: CommGroup) -> float:
    return message.count * (group.skew + seconds(message.kind, message.bytes, group))


def _statistics(sheet: ModelCosts, group: CommGroup) -> RunningSums:
    """Every normalization layer exchanges its own: gathered in forward, summed in backward."""

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
