"""Memory of one stage for one micro-batch: the peaks of its forward and backward passes.

The peak of a pass is the maximum over its units. When forward enters a unit, memory holds what all earlier units saved
and the unit's input; the unit's own peak is added. When backward enters a unit, memory holds what it and all earlier
units saved, the gradient of its output, and the weight gradients that later units have made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.parallel.zero.reduce_scatter import UNDER_WAY
from echelon.planner.model_costs import ModelCosts, ModelUnit
from echelon.strategy.parts import Reduction

Row = np.ndarray[Any, np.dtype[np.float64]]

FIRST_BUCKET = Reduction.first_bucket_mb * 2**20  # bytes of the first bucket of gradients


@dataclass(frozen=True)
class StageMemoryOptions:
    """The properties of a draft and a runtime that a stage's memory depends on.

    recompute: units that are recomputed and save only their input: "" (none), "units" (all) or "repeated"
    gradient:  bytes of a trained entry's gradient
    ranks:     number of ranks over which state is sharded; 1: no sharding
    level:     level of sharding, 0 to 3
    bucket:    bytes of gradients per bucket; 0 if gradients are not reduced over ranks
    messages:  bytes of message buffers for each byte of a bucket, if gradients are reduce-scattered
    casts:     True if 16-bit copies of weights are made and kept until forward ends
    """

    recompute: str
    gradient: float
    ranks: int = 1
    level: int = 0
    bucket: float = 0.0
    messages: float = 0.0
    casts: bool = True


@dataclass(frozen=True)
class PassPeak:
    """The memory peak of a pass, in bytes.

    kept:      part of ``total`` that is saved for backward
    gradients: part of ``total`` that is gradients of weights
    at:        index of the unit at the peak, counted from the stage's first
    """

    total: float
    kept: float
    gradients: float = 0.0
    at: int = 0


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage: permanent sizes, and the peaks of its passes for one micro-batch. All but trained is bytes.

    trained:  number of trained entries
    largest:  bytes of the largest gradient
    held:     bytes that all units keep from forward to backward
    waiting:  bytes that all units keep from I to W
    received, sent_on: bytes of incoming and outgoing messages
    unsaved:  incoming bytes that are only held until a later unit uses them: skip connections
    output:   bytes of the last unit's output, if another stage needs it
    forward:  peak of forward, without gradients of weights
    first:    peak of a backward that makes weight gradients, which stay
    again:    peak of a backward that adds to existing weight gradients, which are not counted
    sent:     peak of a backward during which gradients are sent in buckets
    partly:   peak of a backward without weight gradients (I)
    weights:  peak of the computation of weight gradients alone (W)
    closing:  peak when the last gradients are sent, after backward
    """

    trained: float
    weight_bytes: float
    buffers: float
    largest: float
    held: float
    waiting: float
    received: float
    unsaved: float
    output: float
    sent_on: float
    forward: PassPeak
    first: PassPeak
    again: PassPeak
    sent: PassPeak
    partly: PassPeak
    weights: PassPeak
    closing: PassPeak


class UnitColumns:
    """The fields of all units of a ModelCosts, as arrays over units."""

    def __init__(self, sheet: ModelCosts) -> None:
        units = sheet.units
        self.count = len(units)
        self.trained = _row(units, "trained")
        self.weight_bytes, self.largest = _row(units, "weight_bytes"), _row(units, "largest_weight")
        self.received, self.output = _row(units, "received"), _row(units, "output")
        self.crossing = _or(_row(units, "crossing"), np.append(0.0, self.output[:-1]))
        # Inputs from units before the previous one are already counted: an earlier unit saved them.
        self.entering = np.append(self.received[:1], np.minimum(self.received[1:], self.output[:-1]))
        self.buffers, self.casts = _row(units, "buffers"), _row(units, "casts")
        self.forward, self.backward = _row(units, "forward_peak"), _row(units, "backward_peak")
        self.saved, self.whole = _row(units, "saved"), _row(units, "backward_whole")
        self.kept = _or(_row(units, "kept"), self.received)
        self.forward_again = _or(_row(units, "forward_again"), self.forward)
        self.backward_again = _or(_row(units, "backward_again"), self.saved + self.backward)
        self.whole_again = _row(units, "backward_again_whole")
        self.deferred = _or(_row(units, "deferred"), np.array([_put_off(unit) for unit in units]))
        self.convolves = np.array([_convolves(unit) for unit in units])
        alike: dict[int, int] = {}
        for unit in units:
            alike[id(unit)] = alike.get(id(unit), 0) + 1
        self.repeated = np.array([alike[id(unit)] > 1 for unit in units])
        self.gathered = self._gathered()

    def _gathered(self) -> Row:
        """Return the bytes of weights that shard 3 gathers at a time.

        In the first and last unit, a large weight outside the unit's module (an embedding, a head) is gathered
        separately from the others.
        """
        apart = np.maximum(self.largest, self.weight_bytes - self.largest)
        ends = np.isin(np.arange(self.count), (0, self.count - 1))
        return np.where(ends, apart, self.weight_bytes)


def _row(units: tuple[ModelUnit, ...], name: str) -> Row:
    return np.array([getattr(unit, name) for unit in units], dtype=np.float64)


def _or(row: Row, other: Row) -> Row:
    """Return ``row``, or ``other`` if the profile does not provide the field (all zeros)."""
    return row if row.any() else other


def _put_off(unit: ModelUnit) -> float:
    """Estimate the bytes held for deferred weight gradients, from the bytes that their kernels move."""
    read = sum(kernel.bytes * kernel.count for kernel in unit.backward.kernels if kernel.for_weights)
    return float(max(0.0, min(read - 4 * unit.trained, unit.saved + unit.output)))


def _convolves(unit: ModelUnit) -> bool:
    return any(kernel.kind == "convolution" for kernel in unit.backward.kernels)


@functools.lru_cache(maxsize=512)
def columns(sheet: ModelCosts) -> UnitColumns:
    return UnitColumns(sheet)


@functools.lru_cache(maxsize=65536)
def stage(sheet: ModelCosts, first: int, end: int, terms: StageMemoryOptions) -> StageMemory:
    """Return the memory of units ``first`` up to ``end`` as one stage."""
    rows, at = columns(sheet), slice(first, end)
    passes = _Passes(rows, first, end, terms)
    return StageMemory(
        trained=float(rows.trained[at].sum()),
        weight_bytes=float(rows.weight_bytes[at].sum()),
        buffers=float(rows.buffers[at].sum()),
        largest=float(passes.largest.max(initial=0.0)),
        held=float(passes.kept.sum()),
        waiting=float(passes.put_off.sum()),
        received=_incoming(rows, first, end),
        unsaved=max(0.0, _incoming(rows, first, end) - float(rows.received[first])) if first else 0.0,
        output=float(rows.output[end - 1]) if end < rows.count else 0.0,
        sent_on=_outgoing(rows, first, end),
        forward=passes.forward(),
        first=passes.first(),
        again=passes.again(),
        sent=passes.sent(),
        partly=passes.partly(),
        weights=_putting_off_no_more(passes.put_off, passes.beside(), has_outer=first == 0),
        closing=_closing(float(passes.gradients.sum()), terms),
    )


class _Passes:
    """The units of a stage as arrays, and the memory peaks of passes over them."""

    def __init__(self, rows: UnitColumns, first: int, end: int, terms: StageMemoryOptions) -> None:
        self._rows, self._terms, self._at = rows, terms, slice(first, end)
        self._replayed = _replayed(rows, self._at, terms)
        self.gradients = rows.trained[self._at] * terms.gradient
        self.largest = rows.largest[self._at] * terms.gradient / 4
        self.put_off = rows.deferred[self._at]
        unmade = np.where(self._replayed | terms.casts, 0.0, rows.casts[self._at])
        self.kept = np.maximum(self._chosen(rows.kept, rows.saved) - unmade, 0.0)
        self._before = np.cumsum(self.kept) - self.kept  # bytes kept by all units before each unit
        self._after = self.gradients.sum() - np.cumsum(self.gradients)  # gradients made by all units after each unit
        self._backward = self._chosen(rows.backward_again, rows.backward)
        whole = self._chosen(rows.whole_again, rows.whole)
        self._whole = np.where(whole > 0, np.maximum(whole, self._backward), self._backward + self.gradients)
        self._gathered = _whole_weights(rows, first, end) if terms.level == 3 else np.zeros((2, end - first))
        output = rows.output[self._at] * (np.arange(first, end) < rows.count - 1)  # the loss has no output gradient
        self._entered = self._before + self.kept + output + self._gathered[1]  # when backward enters each unit

    def _chosen(self, again: Row, plain: Row) -> Row:
        return np.where(self._replayed, again[self._at], plain[self._at])

    def forward(self) -> PassPeak:
        rows = self._rows
        copies = np.where(self._replayed & self._terms.casts, rows.casts[self._at], 0.0)  # else ``kept`` has them
        entered = self._before + np.cumsum(copies) - copies + rows.entering[self._at] + self._gathered[0]
        return _fullest(entered + self._chosen(rows.forward_again, rows.forward), self._before)

    def first(self) -> PassPeak:
        return self._fullest(self._whole, self._after)

    def again(self) -> PassPeak:
        totals = self._entered + np.minimum(self._whole, self._backward + self.largest)
        return _fullest(totals, self._before + self.kept)

    def sent(self) -> PassPeak:
        room = self._terms.bucket + self.largest
        own = np.minimum(self._whole, self._backward + room) if self._terms.bucket else self._whole
        return self._fullest(own, _in_buckets(self._after, self._terms))

    def partly(self) -> PassPeak:
        waiting = self.put_off.sum() - np.cumsum(self.put_off)
        return _fullest(self._entered + self._backward + waiting, self._before + self.kept)

    def beside(self) -> Row:
        """Return the bytes of temporaries in W: a gradient, the previous gradient, and a convolution's own copy."""
        copies = np.where(self._rows.convolves[self._at], self.largest, 0.0)
        return self.largest + np.minimum(self.largest, self.gradients - self.largest) + copies

    def _fullest(self, own: Row, made: Row) -> PassPeak:
        """Return the peak of a backward pass.

        own:  each unit's peak including its weight gradients
        made: bytes of weight gradients that exist when backward enters each unit
        """
        return _fullest(self._entered + own + made, self._before + self.kept, made + (own - self._backward))


def _putting_off_no_more(put_off: Row, beside: Row, has_outer: bool) -> PassPeak:
    """Return the peak of W, which runs from the last unit to the first: waiting bytes and temporaries.

    has_outer: True if user code runs before the first unit (an embedding); its gradient comes after the last wait
    """
    waiting = np.cumsum(put_off)
    totals = waiting + beside
    if has_outer:
        totals[0] = max(put_off[0], beside[0])
    return _fullest(totals, waiting)


def _incoming(rows: UnitColumns, first: int, end: int) -> float:
    """Return the bytes that other stages send; a tensor is sent directly to the stage that needs it."""
    return float(min(rows.crossing[first], rows.received[first:end].sum())) if first else 0.0


def _outgoing(rows: UnitColumns, first: int, end: int) -> float:
    if end == rows.count:
        return 0.0
    return float(max(rows.output[end - 1], rows.crossing[end] - rows.crossing[first]))


def _replayed(rows: UnitColumns, at: slice, terms: StageMemoryOptions) -> np.ndarray[Any, np.dtype[np.bool_]]:
    if terms.recompute == "repeated":
        return np.asarray(rows.repeated[at])
    return np.full(len(rows.saved[at]), bool(terms.recompute))


def _fullest(totals: Row, kept: Row, gradients: Row | None = None) -> PassPeak:
    at = int(totals.argmax())
    return PassPeak(float(totals[at]), float(kept[at]), 0.0 if gradients is None else float(gradients[at]), at)


def _whole_weights(rows: UnitColumns, first: int, end: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the bytes of gathered weights under shard 3, in forward and in backward (rows) of each unit.

    They are the unit's own weights and those of the next unit, which are prefetched. The loss, where the last unit has
    its peak, needs no weights.
    """
    own = rows.gathered[first:end]
    following, preceding = np.append(own[1:], 0.0), np.append(0.0, own[:-1])
    loss = np.arange(first, end) == rows.count - 1
    return np.where(loss, 0.0, np.stack([own + following, own + preceding]))


# ---- gradients that are sent while backward runs ----


def _sent(made: Row | float, terms: StageMemoryOptions) -> Any:
    """Return the part of ``made`` bytes of gradients that is in full buckets."""
    full = FIRST_BUCKET + np.floor(np.maximum(np.asarray(made) - FIRST_BUCKET, 0.0) / terms.bucket) * terms.bucket
    return np.where(np.asarray(made) < FIRST_BUCKET, 0.0, full)


def _in_buckets(after: Row, terms: StageMemoryOptions) -> Row:
    """Return the bytes of gradients when backward enters each unit.

    They are gradients that wait for their bucket to fill, message buffers, and the shards that have arrived.
    """
    if not terms.bucket:
        return after
    sent = _sent(after, terms)
    under_way = np.minimum(sent, UNDER_WAY * terms.bucket)
    arrived = (sent - under_way) / terms.ranks if terms.level else 0.0
    return np.asarray(after - sent + terms.messages * under_way + arrived)


def _closing(made: float, terms: StageMemoryOptions) -> PassPeak:
    if not terms.bucket:
        return PassPeak(made, 0.0, made)
    sent = float(_sent(max(made - 1.0, 0.0), terms))
    left = made - sent
    under_way = min(sent, UNDER_WAY * terms.bucket)
    arrived = (sent - under_way) / terms.ranks if terms.level else 0.0
    return PassPeak(left + terms.messages * (left + under_way) + arrived, 0.0, left + arrived)
