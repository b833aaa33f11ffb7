"""Construction of drafts that fit from the shape of a plan: cuts, recompute, and shares of the batch.

The memory of a stage is extrapolated from a prediction of the whole plan: bytes per weight, bytes per byte that its
units save, and a constant rest. So this module does not depend on how a runtime uses memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory
from echelon.planner.cluster.cluster import Device
from echelon.planner.cost.predict import CostModel
from echelon.planner.cost.stage_costs import CostSetting
from echelon.planner.default_run import FP32_EAGER, DefaultRun
from echelon.planner.plan_search.plan_shapes import Flags, PlanShape
from echelon.planner.plan_search.search_result import PlanChoice
from echelon.planner.plan_search.shares import share_out
from echelon.planner.plan_search.stage_partition import StageMemoryLimits, Sums, cut, sums

FOLLOWING = ("cuts", "recompute", "shares", "widths", "order")  #: fields derived from a shape, unless they are given

MOST_RECUTS = 2
FEW_STAGES = 4  # up to this many ranks along the stage axis, memory is always computed for all of them
ROUNDING = 1e-6  # fraction of a limit that is left free, so that sums in another order still fit


@dataclass(frozen=True)
class DraftAttempt:
    """A draft whose time is known and whose memory is not; ``rounds``: number of times that it was cut again to fit."""

    shape: PlanShape
    timed: PlanChoice
    rounds: int = 0


class DraftBuilder:
    """Makes and counts drafts of one model for one batch.

    ``nearest`` is the draft that exceeds its memory least, among those that do not fit.

    fixed: fields of a Draft that are given
    usual: what a run without a strategy compiles
    """

    def __init__(
        self,
        costs: CostModel,
        batch: int,
        fixed: Mapping[str, Any] | None = None,
        usual: DefaultRun = FP32_EAGER,
    ) -> None:
        self.costs, self.batch, self._usual = costs, batch, usual
        self._compile = (fixed or {}).get("compile")
        self.fixed = {name: value for name, value in (fixed or {}).items() if name in FOLLOWING}
        self.made = self.checks = 0
        self.nearest: tuple[float, Draft] | None = None
        self._kinds = {device.name: device for device in costs.cluster.kinds}
        self._most: dict[object, list[float]] = {}
        self._seconds = functools.cache(self._unit_seconds)
        self._weights = functools.cache(self._weights_of)
        self._kept = functools.cache(self._kept_of)
        self._even_cut = functools.cache(self._find_even_cut)

    # ---- drafts that fit ----

    def fitting(self, shape: PlanShape) -> list[PlanChoice]:
        """Return the drafts of this shape that fit: without recompute or, if that does not fit, with little of it."""
        found, waiting = [], [self.first(shape)]
        while waiting:
            attempt = waiting.pop()
            choice = self.checked(attempt)
            if choice is not None:
                found.append(choice)
            else:
                waiting += self.instead(attempt)
        return found

    def first(self, shape: PlanShape) -> DraftAttempt:
        """Return the first attempt: no recompute, even stages."""
        return self.attempt(shape, self.fixed.get("recompute", ()))

    def attempt(
        self, shape: PlanShape, flags: Flags, cuts: tuple[int, ...] | None = None, rounds: int = 0
    ) -> DraftAttempt:
        """Return a draft with its predicted time, without memory."""
        draft = self._drafted(shape, flags)
        if cuts is not None:
            draft = draft.replaced(cuts=cuts)
        self.made += 1
        return DraftAttempt(shape, PlanChoice(draft, self.costs.predict(draft, simulate=False, memory=False)), rounds)

    def checked(self, attempt: DraftAttempt) -> PlanChoice | None:
        """Return the attempt with the memory of every rank, or None if it does not fit."""
        held = self.glance(attempt.timed.draft)
        if not all(memory.fits for memory in held):
            self._note_lack(attempt.timed.draft, held)
            return None
        choice = self._with_memory(attempt.timed)
        return choice if choice.prediction.fits else None

    def instead(self, attempt: DraftAttempt) -> list[DraftAttempt]:
        """Return replacements of an attempt that does not fit.

        They have other cuts, or recompute everywhere or in the stages that do not fit.
        """
        shape, flags = attempt.shape, attempt.timed.draft.recompute
        few = shape.mesh.stage <= FEW_STAGES
        typical_fits = few or self.glance(attempt.timed.draft)[1].fits  # otherwise no other cut can help
        choice = self._with_memory(attempt.timed) if shape.stages > 1 and typical_fits else None
        tried = list(self._recut(attempt, choice)) if choice else []
        if "recompute" in self.fixed or attempt.rounds:
            return tried
        if not flags:
            tried.append(self.attempt(shape, (True,) * shape.stages))
        if choice and not all(flags or (False,)):
            ranks = [memory.fits for memory in choice.prediction.memory]
            now = flags or (False,) * shape.stages
            more = tuple(flag or not ranks[at % shape.mesh.stage] for at, flag in enumerate(now))
            if not all(more) and more != flags:
                tried.append(self.attempt(shape, more))
        return tried

    def glance(self, draft: Draft) -> tuple[PredictedMemory, ...]:
        """Return the memory of the first, a middle and the last rank, or of all ranks of a short pipeline."""
        ranks = range(draft.stage) if draft.stage <= FEW_STAGES else (0, draft.stage // 2, draft.stage - 1)
        self.checks += 1
        return self.costs.memory(draft, self.costs.placement(draft), ranks)

    def _note_lack(self, draft: Draft, held: Sequence[PredictedMemory]) -> None:
        """Store the draft in ``nearest`` if it exceeds its memory less than the present one."""
        lacking = max(memory.total / memory.limit for memory in held)
        if self.nearest is None or lacking < self.nearest[0]:
            self.nearest = (lacking, draft)

    def _recut(self, attempt: DraftAttempt, choice: PlanChoice) -> Iterator[DraftAttempt]:
        """Yield an attempt with cuts that move units from stages that do not fit to others, if there is one."""
        if attempt.shape.stages > 1 and attempt.rounds < MOST_RECUTS and "cuts" not in self.fixed:
            cuts = self._cut_within(attempt.shape, choice)
            if cuts is not None and cuts != choice.draft.cuts:
                yield self.attempt(attempt.shape, choice.draft.recompute, cuts, attempt.rounds + 1)

    def draft(self, shape: PlanShape, flags: Flags) -> PlanChoice:
        """Return the draft with recompute in these stages, cut so that all fit.

        If no cut fits, it is the draft that exceeds its memory least.
        """
        attempt = self.attempt(shape, flags)
        best = choice = self._with_memory(attempt.timed)
        while not choice.prediction.fits:
            attempt = next(self._recut(attempt, choice), attempt)
            if attempt.timed.draft == choice.draft:
                break
            choice = self._with_memory(attempt.timed)
            best = min(best, choice, key=lack)
        return best

    def may_fit(self, shape: PlanShape) -> bool:
        """Return True if the shape may fit with recompute everywhere and good cuts.

        The total memory of all stages is compared with the total limit; in a long pipeline, only a middle stage is.
        """
        draft = self._drafted(shape, self.fixed.get("recompute", (True,) * shape.stages))
        self.checks += 1
        middle = None if draft.stage <= FEW_STAGES else [draft.stage // 2]
        held = self.costs.memory(draft, self.costs.placement(draft), middle)
        part = sum(memory.total for memory in held) / sum(memory.limit for memory in held)
        if part > 1:
            self._note_lack(draft, held)
        return part <= 1

    def predicted(self, draft: Draft) -> PlanChoice:
        """Predict time and memory of any draft."""
        self.made += 1
        return self._with_memory(PlanChoice(draft, self.costs.predict(draft, simulate=False, memory=False)))

    def _with_memory(self, timed: PlanChoice) -> PlanChoice:
        memory = self.costs.memory(timed.draft, self.costs.placement(timed.draft))
        choice = PlanChoice(timed.draft, dataclasses.replace(timed.prediction, memory=memory))
        if not choice.prediction.fits and (self.nearest is None or lack(choice) < self.nearest[0]):
            self.nearest = (lack(choice), choice.draft)
        return choice

    # ---- drafts ----

    def _drafted(self, shape: PlanShape, flags: Flags) -> Draft:
        """Return a draft of the shape, cut by time alone."""
        mesh = shape.mesh
        made = Draft(
            batch=self.batch,
            replicate=mesh.replicate,
            stage=mesh.stage,
            split=mesh.split,
            chunks=shape.chunks,
            cuts=self._even_cut(mesh.names, shape.chunks, self._setting(shape), flags) if shape.stages > 1 else (),
            micro_batches=shape.micro_batches,
            schedule=shape.schedule,
            recompute=flags if any(flags) else (),
            shard=shape.shard,
            amp=shape.amp,
            comm_dtype=shape.comm_dtype,
            approximate=shape.approximate,
            widths=self._widths(shape),
            order=mesh.order,
            compile=self._compiles(shape),
        )
        made = made.replaced(shares=self._shares(shape, made))
        return made.replaced(**self.fixed) if self.fixed else made

    def _compiles(self, shape: PlanShape) -> bool:
        if self._compile is not None:
            return bool(self._compile)
        mesh = shape.mesh
        return self._usual.compiles(replicate=mesh.replicate, stage=mesh.stage, split=mesh.split, shard=shape.shard)

    # ---- cutting ----

    def samples(self, shape: PlanShape) -> int:
        """Return the samples of a micro-batch with even shares, rounded."""
        return max(1, round(self.batch / shape.mesh.replicate / shape.micro_batches))

    def _setting(self, shape: PlanShape) -> CostSetting:
        return CostSetting(self.samples(shape), shape.mesh.split, shape.amp)

    def _unit_seconds(self, name: str, setting: CostSetting, recompute: bool) -> Sums:
        """Return Sums over units of one micro-batch's time on a device of this name."""
        costs = self.costs.unit_seconds(int(setting.samples), setting.split, setting.amp, self._kinds[name])
        passes = [(max(cost.forward, cost.forward_host), max(cost.backward, cost.backward_host)) for cost in costs]
        messages = self._messages(setting)
        return sums(
            [
                forward * (1 + recompute) + backward + message[0] * (1 + recompute) + message[1]
                for (forward, backward), message in zip(passes, messages, strict=True)
            ]
        )

    def _messages(self, setting: CostSetting) -> list[tuple[float, float]]:
        """Return the seconds of every unit's collectives in forward and backward, for a split on adjacent devices."""
        group = self.costs.placement(Draft(batch=self.batch, split=setting.split)).split
        rows = self.costs.units.messages(setting, group).rows
        forward, backward = np.diff(rows[:2], axis=1).tolist()
        return list(zip(forward, backward, strict=True))

    def micro_batch_seconds(self, shape: PlanShape, device: Device) -> Sums:
        """Return Sums over units of one micro-batch's time without recompute."""
        return self._seconds(device.name, self._setting(shape), False)

    def least_seconds(self, shape: PlanShape, device: Device) -> float:
        """Return a lower bound on the seconds per sample of the whole model.

        It is taken from micro-batches of the next power of two, which take no longer per sample, so that few sizes are
        profiled for groups that may never be tried.
        """
        samples = 1 << (self.samples(shape) - 1).bit_length()
        setting = CostSetting(samples, shape.mesh.split, shape.amp)
        return self._seconds(device.name, setting, False)[-1] / samples

    def _stage_seconds(self, names: tuple[str, ...], setting: CostSetting, flags: Flags) -> list[Sums]:
        return [self._seconds(names[stage % len(names)], setting, flag) for stage, flag in enumerate(flags)]

    def _find_even_cut(
        self, names: tuple[str, ...], chunks: int, setting: CostSetting, flags: Flags
    ) -> tuple[int, ...]:
        flags = flags or (False,) * (len(names) * chunks)
        cuts = cut(self._stage_seconds(names, setting, flags))
        assert cuts is not None, "there are no more stages than units"
        return cuts

    def _cut_within(self, shape: PlanShape, tried: PlanChoice) -> tuple[int, ...] | None:
        """Return cuts by time within the memory limits, with memory extrapolated from the prediction of ``tried``."""
        draft = tried.draft
        flags = draft.recompute or (False,) * draft.stages
        held = [self._held(shape, tried, stage, flag) for stage, flag in enumerate(flags)]
        limits = []
        for stage in range(draft.stages):
            memory = tried.prediction.memory[stage % draft.stage]
            limits.append((memory.limit * (1 - ROUNDING) - _apart(memory)) / draft.chunks)
        if min(limits) <= 0:
            return None
        return cut(self._stage_seconds(shape.mesh.names, self._setting(shape), flags), StageMemoryLimits(held, limits))

    def _held(self, shape: PlanShape, tried: PlanChoice, stage: int, recompute: bool) -> Sums:
        """Return Sums over units of the bytes that they would take in this stage."""
        draft = tried.draft
        rank = stage % draft.stage
        memory = tried.prediction.memory[rank]
        weights, kept = self._weights(self._setting(shape)), self._kept(self._setting(shape), recompute)
        bounds = (0, *draft.cuts, len(weights) - 1)
        own = [(bounds[at], bounds[at + 1]) for at in range(rank, draft.stages, draft.stage)]
        by_weight = _held_always(memory) / (sum(weights[end] - weights[first] for first, end in own) or 1.0)
        by_byte = memory.activations / (sum(kept[end] - kept[first] for first, end in own) or 1.0)
        return tuple(by_weight * weight + by_byte * byte for weight, byte in zip(weights, kept, strict=True))

    def _weights_of(self, setting: CostSetting) -> Sums:
        sheet = self.costs.units.sheet(int(setting.samples), setting.split, setting.amp)
        return sums([unit.weights + 1e-9 for unit in sheet.units])  # avoids a division by zero

    def _kept_of(self, setting: CostSetting, recompute: bool) -> Sums:
        sheet = self.costs.units.sheet(int(setting.samples), setting.split, setting.amp)
        return sums([(unit.received if recompute else unit.saved) + 1e-9 for unit in sheet.units])

    # ---- devices of several kinds ----

    def speed(self, shape: PlanShape, device: Device) -> float:
        """Return the samples per second of the whole model on one device."""
        return self.samples(shape) / self.micro_batch_seconds(shape, device)[-1]

    def _shares(self, shape: PlanShape, draft: Draft) -> tuple[float, ...]:
        """Return the samples of each replica, or () if all have the same number.

        Devices get samples by their speed, but no more than their memory holds. If the batch does not fit at all, only
        their speed counts.
        """
        mesh = shape.mesh
        speeds = [speed for count, device in mesh.replicas for speed in [self.speed(shape, device)] * count]
        if len(set(speeds)) == 1 and len({device.memory for _, device in mesh.replicas}) == 1:
            each, more = divmod(self.batch, mesh.replicate)
            return (each + 1.0,) * more + (float(each),) * (mesh.replicate - more) if more else ()
        shares = share_out(self.batch, speeds)
        assert shares is not None
        caps = self._caps(shape, draft)
        if any(share > cap for share, cap in zip(shares, caps, strict=True)):
            shares = share_out(self.batch, speeds, caps) or shares
        return tuple(map(float, shares))

    def _caps(self, shape: PlanShape, draft: Draft) -> list[float]:
        """Return the most samples that the memory of each replica holds, up to the whole batch; 0 if not one does."""
        key = (shape.mesh.key, draft)
        if key not in self._most:
            caps: list[float] = []
            for count, device in shape.mesh.replicas:
                caps += [self._cap(draft, device.memory * (1 - ROUNDING))] * count
            self._most[key] = caps
        return self._most[key]

    def _cap(self, draft: Draft, limit: float) -> float:
        """Return the most samples that ``limit`` bytes on each device hold, found by bisection of the micro-batch."""
        micros = draft.micro_batches
        sizes = range(1, math.ceil(self.batch / micros) + 1)

        def is_too_large(size: int) -> bool:
            alike = draft.replaced(batch=size * micros * draft.replicate, shares=())
            self.checks += 1
            return not all(memory.fits for memory in self.costs.replica_memory(alike, [limit] * draft.stage))

        return float(min(self.batch, bisect_left(sizes, True, key=is_too_large) * micros))

    def _widths(self, shape: PlanShape) -> tuple[float, ...]:
        return tuple(self.speed(shape, device) for device in shape.mesh.parts)


def lack(choice: PlanChoice) -> float:
    """Return the largest ratio of needed memory to its limit over all ranks."""
    return max((memory.total / memory.limit for memory in choice.prediction.memory if memory.limit), default=0.0)


def _held_always(memory: PredictedMemory) -> float:
    return memory.parameters + memory.gradients + memory.optimizer


def _apart(memory: PredictedMemory) -> float:
    """Return the bytes that do not grow with the number of units."""
    return memory.transient + memory.exchange + memory.buffers
