"""From the shape of a plan to drafts that fit the devices: where to cut, what to recompute, who gets how much.

What a stage holds is read off a prediction of the whole: so many bytes for each of its weights, so many for each byte
that its units keep, the rest as it is. So nothing here knows how a runtime uses memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory
from echelon.planner.cluster.cluster import Device
from echelon.planner.cost.predict import CostModel
from echelon.planner.cost.stage_costs import CostSetting
from echelon.planner.plan_search.plan_shapes import Flags, PlanShape
from echelon.planner.plan_search.search_result import PlanChoice
from echelon.planner.plan_search.shares import share_out
from echelon.planner.plan_search.stage_partition import StageMemoryLimits, Sums, cut, sums

FOLLOWING = ("cuts", "recompute", "shares", "widths", "order")  #: what follows from a shape, unless it is given

MOST_RECUTS = 2
FEW_STAGES = 4  # up to so many ranks along the stage axis, memory is always looked at on all of them
ROUNDING = 1e-6  # part of a limit that is left free, so that sums in another order still fit


@dataclass(frozen=True)
class DraftAttempt:
    """A draft whose time is known and whose memory is not; ``rounds``: how often it was cut anew to fit."""

    shape: PlanShape
    timed: PlanChoice
    rounds: int = 0


class DraftBuilder:
    """Makes drafts of one model for one batch. Counts them; of those that do not fit, keeps the one that lacks least.

    fixed: fields of a Draft that are given
    """

    def __init__(self, costs: CostModel, batch: int, fixed: Mapping[str, Any] | None = None) -> None:
        self.costs, self.batch = costs, batch
        self.fixed = {name: value for name, value in (fixed or {}).items() if name in FOLLOWING}
        self.made = self.checks = 0
        self.nearest: tuple[float, Draft] | None = None
        self._kinds = {device.name: device for device in costs.cluster.kinds}
        self._seconds = functools.cache(self._unit_seconds)
        self._weights = functools.cache(self._weights_of)
        self._kept = functools.cache(self._kept_of)
        self._even_cut = functools.cache(self._find_even_cut)

    # ---- what fits ----

    def fitting(self, shape: PlanShape) -> list[PlanChoice]:
        """All of this shape that fit: without recomputing; or, where that does not fit, with as little as will do."""
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
        """What to try before all else: nothing recomputed, stages even."""
        return self.attempt(shape, self.fixed.get("recompute", ()))

    def attempt(
        self, shape: PlanShape, flags: Flags, cuts: tuple[int, ...] | None = None, rounds: int = 0
    ) -> DraftAttempt:
        """Timed, memory not looked at."""
        draft = self._drafted(shape, flags)
        if cuts is not None:
            draft = draft.replaced(cuts=cuts)
        self.made += 1
        return DraftAttempt(shape, PlanChoice(draft, self.costs.predict(draft, simulate=False, memory=False)), rounds)

    def checked(self, attempt: DraftAttempt) -> PlanChoice | None:
        """With what every rank holds; None where it does not fit."""
        held = self.glance(attempt.timed.draft)
        if not all(memory.fits for memory in held):
            self._note_lack(attempt.timed.draft, held)
            return None
        choice = self._with_memory(attempt.timed)
        return choice if choice.prediction.fits else None

    def instead(self, attempt: DraftAttempt) -> list[DraftAttempt]:
        """Where that does not fit: other cuts; and recomputing, everywhere or in the stages that are too full."""
        shape, flags = attempt.shape, attempt.timed.draft.recompute
        few = shape.mesh.stage <= FEW_STAGES
        typical_fits = few or self.glance(attempt.timed.draft)[1].fits  # else no way of cutting can help
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
        """What some ranks hold: the first, one in the middle, the last; of a short pipeline all."""
        ranks = range(draft.stage) if draft.stage <= FEW_STAGES else (0, draft.stage // 2, draft.stage - 1)
        self.checks += 1
        return self.costs.memory(draft, self.costs.placement(draft), ranks)

    def _note_lack(self, draft: Draft, held: Sequence[PredictedMemory]) -> None:
        """Keep the draft that lacks least, among those that were only glanced at."""
        lacking = max(memory.total / memory.limit for memory in held)
        if self.nearest is None or lacking < self.nearest[0]:
            self.nearest = (lacking, draft)

    def _recut(self, attempt: DraftAttempt, choice: PlanChoice) -> Iterator[DraftAttempt]:
        """Units go from stages that are too full to others."""
        if attempt.shape.stages > 1 and attempt.rounds < MOST_RECUTS and "cuts" not in self.fixed:
            cuts = self._cut_within(attempt.shape, choice)
            if cuts is not None and cuts != choice.draft.cuts:
                yield self.attempt(attempt.shape, choice.draft.recompute, cuts, attempt.rounds + 1)

    def draft(self, shape: PlanShape, flags: Flags) -> PlanChoice:
        """With these stages recomputed, cut so that all fit; where they cannot, what lacks least."""
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
        """Whether it would with everything recomputed and cut well: whether stages hold no more than they may on the
        whole, or in a long pipeline, whether one in the middle does."""
        draft = self._drafted(shape, self.fixed.get("recompute", (True,) * shape.stages))
        self.checks += 1
        middle = None if draft.stage <= FEW_STAGES else [draft.stage // 2]
        held = self.costs.memory(draft, self.costs.placement(draft), middle)
        part = sum(memory.total for memory in held) / sum(memory.limit for memory in held)
        if part > 1:
            self._note_lack(draft, held)
        return part <= 1

    def predicted(self, draft: Draft) -> PlanChoice:
        """Time and memory of any draft."""
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
        """Cut by time alone."""
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
            wire=shape.wire,
            approximate=shape.approximate,
            shares=self._shares(shape),
            widths=self._widths(shape),
            order=mesh.order,
            compile=shape.compile,
        )
        return made.replaced(**self.fixed) if self.fixed else made

    # ---- cutting ----

    def samples(self, shape: PlanShape) -> int:
        """Of a micro-batch on most replicas."""
        return max(1, round(self.batch / shape.mesh.replicate / shape.micro_batches))

    def _setting(self, shape: PlanShape) -> CostSetting:
        return CostSetting(self.samples(shape), shape.mesh.split, shape.amp)

    def _unit_seconds(self, name: str, setting: CostSetting, recompute: bool) -> Sums:
        """Sums over units of one micro-batch's time on a device of this name."""
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
        """Of every unit, forward and backward, where a split is on neighbouring devices."""
        group = self.costs.placement(Draft(batch=self.batch, split=setting.split)).split
        rows = self.costs.units.messages(setting, group).rows
        forward, backward = np.diff(rows[:2], axis=1).tolist()
        return list(zip(forward, backward, strict=True))

    def micro_batch_seconds(self, shape: PlanShape, device: Device) -> Sums:
        """Without recompute: no way of cutting takes less."""
        return self._seconds(device.name, self._setting(shape), False)

    def least_seconds(self, shape: PlanShape, device: Device) -> float:
        """For a sample through the whole model: that of micro-batches of the next power of two, which take no longer.
        So few sizes are profiled for what may never be looked at."""
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
        """By time, in the room that stages have, going by what ``tried`` is said to hold."""
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
        """Sums over units of the bytes that they would take in this stage."""
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
        return sums([unit.weights + 1e-9 for unit in sheet.units])  # never none: it is divided by

    def _kept_of(self, setting: CostSetting, recompute: bool) -> Sums:
        sheet = self.costs.units.sheet(int(setting.samples), setting.split, setting.amp)
        return sums([(unit.received if recompute else unit.saved) + 1e-9 for unit in sheet.units])

    # ---- devices of several kinds ----

    def speed(self, shape: PlanShape, device: Device) -> float:
        """Samples a second through the whole model."""
        return self.samples(shape) / self.micro_batch_seconds(shape, device)[-1]

    def _shares(self, shape: PlanShape) -> tuple[float, ...]:
        """Samples of each replica; () where all have as many."""
        mesh = shape.mesh
        speeds = [speed for count, device in mesh.replicas for speed in [self.speed(shape, device)] * count]
        if len(set(speeds)) == 1:
            each, more = divmod(self.batch, mesh.replicate)
            return (each + 1.0,) * more + (float(each),) * (mesh.replicate - more) if more else ()
        shares = share_out(self.batch, speeds)
        assert shares is not None
        return tuple(map(float, shares))

    def _widths(self, shape: PlanShape) -> tuple[float, ...]:
        return tuple(self.speed(shape, device) for device in shape.mesh.parts)


def lack(choice: PlanChoice) -> float:
    """How many times its memory the fullest device would need."""
    return max((memory.total / memory.limit for memory in choice.prediction.memory if memory.limit), default=0.0)


def _held_always(memory: PredictedMemory) -> float:
    return memory.parameters + memory.gradients + memory.optimizer


def _apart(memory: PredictedMemory) -> float:
    """What does not grow with the number of units."""
    return memory.transient + memory.exchange + memory.buffers
