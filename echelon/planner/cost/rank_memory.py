"""Peak memory of every rank along the stage axis.

A step has few kinds of moments: forward of a micro-batch, its backward, the end of backward when the last gradients are
sent, and the update. The bytes at each moment are added up from a profile, in the way the runtime holds them:

* With one micro-batch and no pipeline, gradients of the previous step live until backward begins, beside all
  activations.
* Replicas copy gradients into persistent buckets; gradients that wait for their bucket to fill exist beside it.
* With several micro-batches, full gradients live from the first one to the last, at any level of ``shard``.
* A stage keeps its output and the message made of it until the backward of the micro-batch.
* Batches that are merged into one update add to gradients as micro-batches do. In a pipeline, the gradients of earlier
  batches are held beside a batch; under shard 2 and 3, which reduce-scatter each batch at once, their shards are.
* Under low_memory weights are 16-bit, and each gradient is applied and freed during backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echelon.parallel.low_memory.backward_updates import UNDER_WAY as UPDATES_UNDER_WAY
from echelon.parallel.low_memory.formats import AT_ONCE
from echelon.parallel.zero.reduce_scatter import UNDER_WAY
from echelon.plan.draft import Draft
from echelon.plan.prediction import PredictedMemory
from echelon.planner.cost.in_flight import ScheduleMoment, moments_of_rank, one_after_another
from echelon.planner.cost.stage_memory import PassPeak, StageMemory, StageMemoryOptions, stage
from echelon.planner.cost.strategy_traffic import LOW_MEMORY, RESIDUAL
from echelon.planner.cost.system import ECHELON, System
from echelon.planner.model_costs import ModelCosts, ProfileLike, compiled_view

Place = Literal["cuda", "cpu"]

#: Temporaries of an update, as a fraction of all trained weights on a GPU (foreach: one operation for all of them) and
#: as a fraction of the largest weight on a CPU (one weight after another), measured by
#: benchmarks/planner/planner_memory.py.
FOREACH = {
    "sgd": 0.0,
    "momentum": 0.0,
    "adam": 1.0,
    "adamw": 1.0,
    "rmsprop": 1.0,
    "adagrad": 1.0,
    "lamb": 0.0,
    "lars": 0.0,
}
SINGLE = {
    "sgd": 0.0,
    "momentum": 0.0,
    "adam": 2.0,
    "adamw": 2.0,
    "rmsprop": 1.0,
    "adagrad": 2.0,
    "lamb": 2.0,
    "lars": 1.0,
}

WORKSPACE = 8.125 * 2**20  # bytes of the cuBLAS workspace on a GPU, which lives as long as the process
#: Temporary bytes per element of a low_memory update on a CPU, measured on weights of 2^20 elements. A GPU needs none,
#: because it has one kernel for the update.
LOW_MEMORY_ON_CPU = 68


@dataclass(frozen=True)
class PeakMoment:
    """The memory peak of a rank.

    moment: phase of the step at the peak
    unit:   index of the unit at the peak; None for "exchange" and "update"
    """

    memory: PredictedMemory
    moment: Literal["forward", "backward", "exchange", "update"]
    unit: int | None = None


def find_peak_moments(
    profile: ProfileLike,
    draft: Draft,
    limits: Sequence[float] | float = (),
    *,
    system: System = ECHELON,
    optimizer: str = "adam",
    place: Place = "cuda",
    workspace: float | None = None,
    ranks: Iterable[int] | None = None,
    merge: int = 1,
    low_memory: bool = False,
) -> tuple[PeakMoment, ...]:
    """Return the memory peak of every rank along the stage axis, for the replica with the largest share of the batch.

    limits:    bytes that each rank may use, or one number for all; (): no limit
    optimizer: name of the optimizer, one of ``system.state``; default "adam"
    place:     kind of device: GPUs need temporaries for all weights in an update; on CPUs, gradients that are
               reduce-scattered need twice their bytes for messages; default "cuda"
    workspace: bytes that libraries use; default: WORKSPACE on GPUs, 0 on CPUs
    ranks:     ranks along the stage axis to compute; default: all
    merge:     number of the draft's batches that are merged into one update; default 1
    low_memory: True if the model is trained with low_memory; default False
    """
    if merge > 1 and draft.shard < 2 and draft.stage == draft.micro_batches == 1:
        draft, merge = draft.replaced(batch=draft.batch * merge, micro_batches=merge), 1
    if low_memory:
        system = replace(system, amp_weights=2.0, amp_gradients=0.0, state={optimizer: LOW_MEMORY})
    sheet = compiled_view(profile, draft.compile).sheet(samples_of(draft), draft.split, draft.amp)
    room = (WORKSPACE if place == "cuda" else 0.0) if workspace is None else workspace
    applied = max(min(unit.largest_weight / 4, unit.trained) for unit in sheet.units) if low_memory else 0.0
    inputs = RankMemoryInputs(draft, system, optimizer, place, room, merge, applied)
    edges = (0, *draft.cuts, len(sheet.units))
    found = []
    for rank in range(draft.stage) if ranks is None else ranks:
        own = range(rank, draft.stages, draft.stage)
        stages = [stage(sheet, edges[at], edges[at + 1], inputs.terms(at)) for at in own]
        spans = [(edges[at], edges[at + 1]) for at in own]
        limit = limits if isinstance(limits, int | float) else limits[rank] if limits else 0.0
        firsts = [first for first, _ in spans]
        found.append(
            _RankMoments(inputs, stages, _twice(profile, sheet, spans), _batch(sheet, draft), firsts).fullest(
                rank, limit
            )
        )
    return tuple(found)


def samples_of(draft: Draft) -> int:
    """Return the samples of the largest micro-batch of the replica with the largest share."""
    share = max(draft.shares) / sum(draft.shares) if draft.shares else 1 / draft.replicate
    return max(1, math.ceil(draft.batch * share / draft.micro_batches - 1e-9))


def _batch(sheet: ModelCosts, draft: Draft) -> float:
    """Return the bytes of a replica's batch, which each of its ranks holds, less what the first unit saves of it."""
    kept = min(sheet.units[0].received, sheet.units[0].saved)
    return max(sheet.given * draft.micro_batches - kept, 0.0)


def _twice(profile: ProfileLike, sheet: ModelCosts, spans: Sequence[tuple[int, int]]) -> float:
    """Return the number of weight entries that are counted more than once because several of these units share them."""

    def here(unit: int) -> bool:
        return any(first <= unit < end for first, end in spans)

    return sum(
        max(0, sum(map(here, group)) - 1) * entries for group, entries in zip(profile.ties, sheet.tied, strict=True)
    )


@dataclass(frozen=True)
class RankMemoryInputs:
    """The properties of a draft and a runtime that are the same for every rank.

    merge:   number of batches that are merged into one update, if they do not run as micro-batches
    applied: under low_memory, number of entries of the largest gradient; otherwise 0
    """

    draft: Draft
    system: System
    optimizer: str
    place: Place
    workspace: float
    merge: int = 1
    applied: float = 0.0

    @property
    def sharing(self) -> int:
        """Number of ranks over which state is sharded."""
        return self.draft.sharing

    @property
    def reduced(self) -> bool:
        """True if gradients are reduced over replicas in persistent buckets."""
        return self.draft.replicate > 1 and not self.draft.shard and self.draft.approximate != "localsgd"

    @property
    def passes(self) -> int:
        """Number of backward passes that accumulate into a gradient."""
        return self.draft.micro_batches

    @property
    def messages(self) -> float:
        """Bytes of message buffers, sent and received, for each byte of a bucket that is reduce-scattered."""
        return 2.0 if self.place == "cpu" else 1.0 + 1.0 / self.sharing

    def terms(self, at: int) -> StageMemoryOptions:
        """Return the options of stage ``at``."""
        draft, travels = self.draft, self.draft.replicate > 1 and self.draft.approximate != "localsgd"
        recompute = bool(draft.recompute) and draft.recompute[at]
        return StageMemoryOptions(
            recompute=self.system.replays if recompute else "",
            gradient=self.system.gradient_bytes(draft.amp),
            ranks=self.sharing,
            level=draft.shard if draft.replicate > 1 else 0,
            bucket=self.system.bucket if travels else 0.0,
            messages=self.messages if draft.shard and travels else 0.0,
            casts=self.system.amp_weights >= self.system.weights and draft.shard != 3,
        )


class _RankMoments:
    """Memory of one rank at every kind of moment."""

    def __init__(
        self, inputs: RankMemoryInputs, stages: Sequence[StageMemory], twice: float, batch: float, firsts: Sequence[int]
    ) -> None:
        self._inputs = inputs
        self._stages = stages
        self._batch = batch
        self._firsts = firsts
        draft, system = inputs.draft, inputs.system
        trained = sum(one.trained for one in stages) - twice
        held_here = sum(one.weight_bytes for one in stages) / 4 - twice
        self._weights = held_here * system.weight_bytes(draft.amp) / (inputs.sharing if draft.shard == 3 else 1)
        if inputs.applied:  # low_memory narrows only trained weights
            self._weights = held_here * system.weights - trained * (system.weights - system.amp_weights)
        self._gradients = trained * system.gradient_bytes(draft.amp)
        self._state = trained * system.state_bytes(inputs.optimizer) / inputs.sharing
        self._trained = trained
        self._buffers = sum(one.buffers for one in stages) + batch + inputs.workspace
        self._exchange = self._standing_exchange()
        self._kept = [(one.held + one.output + one.sent_on + one.unsaved, one.waiting) for one in stages]

    def _standing_exchange(self) -> float:
        """Return the bytes of persistent message buffers and copies."""
        draft, entries = self._inputs.draft, self._trained
        wire = entries * (4 + 6 / draft.replicate) if draft.comm_dtype and self._inputs.reduced else 0.0
        residual = RESIDUAL * entries if draft.approximate == "dgc" else 0.0
        anchor = self._weights if draft.approximate == "localsgd" and draft.replicate > 1 else 0.0
        return wire + residual + anchor

    def fullest(self, rank: int, limit: float) -> PeakMoment:
        peak = max(self._moments(rank, limit), key=lambda one: one.memory.total)
        completed = self._completed(peak.memory)
        return peak if completed is peak.memory else replace(peak, memory=completed)

    def _completed(self, held: PredictedMemory) -> PredictedMemory:
        """Add the gradients of earlier merged batches, or the gradient that low_memory applies."""
        inputs, entries = self._inputs, self._inputs.applied
        if entries:
            temporary = LOW_MEMORY_ON_CPU * min(entries, AT_ONCE) if inputs.place == "cpu" else 0.0
            sums = (UPDATES_UNDER_WAY + 1) * 4 * entries if inputs.draft.replicate > 1 else 0.0  # in fp32
            return replace(
                held, gradients=2 * entries, transient=held.transient + temporary, exchange=held.exchange + sums
            )
        if inputs.merge == 1:
            return held
        if inputs.draft.shard > 1:
            return replace(held, gradients=held.gradients + self._stale())
        return replace(held, gradients=max(held.gradients, self._gradients))

    def _moments(self, rank: int, limit: float) -> Iterator[PeakMoment]:
        draft = self._inputs.draft
        if draft.stage == 1 and draft.chunks == 1:
            found = one_after_another(draft.micro_batches)
        else:
            found = moments_of_rank(draft.schedule or "1f1b", draft.stages, draft.stage, draft.micro_batches, rank)
        yield self._while(max(found, key=self._bytes_at), limit)
        yield PeakMoment(self._closing(limit), "exchange")
        yield PeakMoment(self._update(limit), "update")

    # ---- the kinds of moments ----

    def _bytes_at(self, moment: ScheduleMoment) -> float:
        """Return the bytes that depend on the moment; a search looks at hundreds of thousands of moments."""
        one = self._stages[moment.chunk]
        peak, gradients = self._pass(moment, one)
        total = gradients + peak.total + self._messages(moment, one)
        for count, waits, (opened, waiting) in zip(moment.open, moment.waiting, self._kept, strict=True):
            total += count * opened + waits * waiting
        return total

    def _while(self, moment: ScheduleMoment, limit: float) -> PeakMoment:
        one = self._stages[moment.chunk]
        peak, gradients = self._pass(moment, one)
        others = sum(
            count * each.held + waits * each.waiting
            for count, waits, each in zip(moment.open, moment.waiting, self._stages, strict=True)
        )
        sent = sum(
            count * (each.output + each.sent_on + each.unsaved)
            for count, each in zip(moment.open, self._stages, strict=True)
        )
        held = self._memory(
            limit,
            gradients=gradients + peak.gradients,
            activations=others + peak.kept,
            transient=peak.total - peak.kept - peak.gradients,
            exchange=sent + self._messages(moment, one),
        )
        return PeakMoment(held, "forward" if moment.kind == "F" else "backward", self._firsts[moment.chunk] + peak.at)

    def _pass(self, moment: ScheduleMoment, one: StageMemory) -> tuple[PassPeak, float]:
        """Return the peak of the pass that runs, and the bytes of gradients that existed before it."""
        alone = self._inputs.passes == 1 and len(self._stages) == 1 and self._inputs.draft.stage == 1
        before = self._made(moment)
        if moment.kind == "F":
            return one.forward, self._stale() if alone else before
        if moment.kind == "I":
            return one.partly, before
        if moment.kind == "W":
            return one.weights, before
        if alone:
            return one.sent, self._rows()
        return (one.again if moment.made[moment.chunk] else one.first), before

    def _messages(self, moment: ScheduleMoment, one: StageMemory) -> float:
        """Return the bytes of pipeline messages: posted receives, the action's own message, and sent gradients."""
        if self._inputs.draft.stage == 1:
            return 0.0
        expected = moment.coming * one.received + moment.returning * one.sent_on
        # Forward makes a message. In backward, the last unit's output has a gradient, and so has ``unsaved``.
        return expected + one.unsaved + max(one.sent_on, one.output) + moment.returned * one.received

    def _closing(self, limit: float) -> PredictedMemory:
        """Return the memory at the end of the last backward, when the remaining gradients are sent."""
        peaks = [one.closing for one in self._stages]
        if self._inputs.passes > 1 and not self._inputs.sharing > 1:
            return self._memory(limit, gradients=self._rows() + self._gradients)
        total, gradients = (sum(getattr(peak, part) for peak in peaks) for part in ("total", "gradients"))
        return self._memory(limit, gradients=self._rows() + gradients, exchange=total - gradients)

    def _update(self, limit: float) -> PredictedMemory:
        inputs, share = self._inputs, self._inputs.sharing
        if inputs.place == "cuda":
            transient = FOREACH.get(inputs.optimizer, 1.0) * self._gradients / share
        else:
            transient = SINGLE.get(inputs.optimizer, 2.0) * max(one.largest for one in self._stages) / share
        handing_round = 0.0
        if inputs.draft.shard in (1, 2) and share > 1:
            travelling = min(self._gradients, (UNDER_WAY + 1) * inputs.system.bucket)
            handing_round = travelling * (1 + 1 / share)
        larger = handing_round > transient  # the update and the all-gather run in sequence, so the larger one counts
        return self._memory(
            limit,
            gradients=self._stale(),
            transient=0.0 if larger else transient,
            exchange=handing_round if larger else 0.0,
        )

    # ---- gradients ----

    def _rows(self) -> float:
        """Return the bytes of persistent buckets."""
        return self._gradients if self._inputs.reduced else 0.0

    def _stale(self) -> float:
        """Return the bytes of gradients between two steps."""
        return self._gradients / self._inputs.sharing

    def _made(self, moment: ScheduleMoment) -> float:
        """Return the bytes of buckets and of full gradients of the stages that have had a backward in this step."""
        width = self._inputs.system.gradient_bytes(self._inputs.draft.amp)
        made = sum(one.trained for one, is_made in zip(self._stages, moment.made, strict=True) if is_made)
        return self._rows() + made * width

    def _memory(
        self,
        limit: float,
        *,
        gradients: float,
        activations: float = 0.0,
        transient: float = 0.0,
        exchange: float = 0.0,
    ) -> PredictedMemory:
        return PredictedMemory(
            parameters=self._weights,
            gradients=gradients,
            optimizer=self._state,
            activations=activations,
            transient=transient,
            exchange=exchange + self._exchange,
            buffers=self._buffers,
            limit=limit,
        )
