"""What one stage needs for one micro-batch, pass by pass: the fullest moment of its forward and of its backward.

Of a pass over units the fullest moment is looked for unit by unit. When forward enters a unit, there is what all units
before it keep and what it receives; its own peak comes on top. When backward enters it, there is what it and all units
before it keep, the gradient of its output, and the gradients of weights that the units after it have made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.planner.model_costs import ModelCosts, ModelUnit

Row = np.ndarray[Any, np.dtype[np.float64]]

FIRST_BUCKET = float(2**20)  # bytes of the first bucket of gradients, see strategy.parts.Reduction
UNDER_WAY = 2  # buckets of a shard that are summed at one time, see parallel.shard.reduce


@dataclass(frozen=True)
class StageMemoryOptions:
    """What of a draft and a runtime matters inside a stage.

    recompute: "" (nothing), "units" or "repeated": which units keep only what they receive
    gradient:  bytes of a trained entry's gradient
    ranks:     that share parameters out, or sum gradients; 1 where nobody does
    level:     of sharding, 0 to 3
    bucket:    bytes of gradients that travel together; 0 where nothing travels
    messages:  bytes on the way for each byte of a bucket, where gradients are scattered
    casts:     whether 16-bit copies of weights are made, and kept until forward ends
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
    """The fullest moment of a pass: all of it, and of that what is kept for backward and what gradients take.

    at: the unit in which it lies, counted from the stage's first
    """

    total: float
    kept: float
    gradients: float = 0.0
    at: int = 0


@dataclass(frozen=True)
class StageMemory:
    """One stage. What is held always, and its passes for one micro-batch.

    trained:  entries of its weights; largest: bytes of the largest gradient
    held:     kept from forward to backward, all units
    waiting:  kept from I to W
    received, sent_on: messages that come in and that leave
    unsaved:  of what comes in, what only waits for its use: skip connections
    output:   what the last unit hands on, where another stage needs it
    forward:  gradients of weights are not in it
    first:    backward that makes gradients of weights; they stay
    again:    backward that adds to gradients: those that were there are not in it
    sent:     backward after which gradients leave in buckets
    partly:   backward without gradients of weights (I)
    weights:  the fullest moment of making them alone (W)
    closing:  what leaves last, when nothing else is left
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
    """A sheet's units as rows of numbers."""

    def __init__(self, sheet: ModelCosts) -> None:
        units = sheet.units
        self.count = len(units)
        self.trained = _row(units, "trained")
        self.weight_bytes, self.largest = _row(units, "weight_bytes"), _row(units, "largest_weight")
        self.received, self.output = _row(units, "received"), _row(units, "output")
        self.crossing = _or(_row(units, "crossing"), np.append(0.0, self.output[:-1]))
        # What comes from further back was kept by a unit before.
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
        """Bytes that shard 3 makes whole at a time. A large weight in the glue of the ends (a head, an embedding) comes
        apart from the unit's own."""
        apart = np.maximum(self.largest, self.weight_bytes - self.largest)
        ends = np.isin(np.arange(self.count), (0, self.count - 1))
        return np.where(ends, apart, self.weight_bytes)


def _row(units: tuple[ModelUnit, ...], name: str) -> Row:
    return np.array([getattr(unit, name) for unit in units], dtype=np.float64)


def _or(row: Row, other: Row) -> Row:
    """``row`` where it says something; a sheet may leave it out."""
    return row if row.any() else other


def _put_off(unit: ModelUnit) -> float:
    """From the kernels that make gradients of weights: what they read."""
    read = sum(kernel.bytes * kernel.count for kernel in unit.backward.kernels if kernel.for_weights)
    return float(max(0.0, min(read - 4 * unit.trained, unit.saved + unit.output)))


def _convolves(unit: ModelUnit) -> bool:
    return any(kernel.kind == "convolution" for kernel in unit.backward.kernels)


@functools.lru_cache(maxsize=512)
def columns(sheet: ModelCosts) -> UnitColumns:
    return UnitColumns(sheet)


@functools.lru_cache(maxsize=65536)
def stage(sheet: ModelCosts, first: int, end: int, terms: StageMemoryOptions) -> StageMemory:
    """Units ``first`` to ``end`` of the sheet as one stage."""
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
        weights=_putting_off_no_more(passes.put_off, passes.beside(), glue=first == 0),
        closing=_closing(float(passes.gradients.sum()), terms),
    )


class _Passes:
    """The units of a stage, one entry each, and the fullest moments of passes over them."""

    def __init__(self, rows: UnitColumns, first: int, end: int, terms: StageMemoryOptions) -> None:
        self._rows, self._terms, self._at = rows, terms, slice(first, end)
        self._replayed = _replayed(rows, self._at, terms)
        self.gradients = rows.trained[self._at] * terms.gradient
        self.largest = rows.largest[self._at] * terms.gradient / 4
        self.put_off = rows.deferred[self._at]
        unmade = np.where(self._replayed | terms.casts, 0.0, rows.casts[self._at])
        self.kept = np.maximum(self._chosen(rows.kept, rows.saved) - unmade, 0.0)
        self._before = np.cumsum(self.kept) - self.kept  # kept by the units before each
        self._after = self.gradients.sum() - np.cumsum(self.gradients)  # made by the units behind each
        self._backward = self._chosen(rows.backward_again, rows.backward)
        whole = self._chosen(rows.whole_again, rows.whole)
        self._whole = np.where(whole > 0, np.maximum(whole, self._backward), self._backward + self.gradients)
        self._gathered = _whole_weights(rows, first, end) if terms.level == 3 else np.zeros((2, end - first))
        output = rows.output[self._at] * (np.arange(first, end) < rows.count - 1)  # a loss has no gradient beside it
        self._entered = self._before + self.kept + output + self._gathered[1]  # when backward comes

    def _chosen(self, again: Row, plain: Row) -> Row:
        return np.where(self._replayed, again[self._at], plain[self._at])

    def forward(self) -> PassPeak:
        rows = self._rows
        copies = np.where(self._replayed & self._terms.casts, rows.casts[self._at], 0.0)  # else they are kept anyway
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
        """Where gradients of weights are made apart: one, the one before it, and a convolution's own copy."""
        copies = np.where(self._rows.convolves[self._at], self.largest, 0.0)
        return self.largest + np.minimum(self.largest, self.gradients - self.largest) + copies

    def _fullest(self, own: Row, made: Row) -> PassPeak:
        """``own``: each unit's peak with its gradients; ``made``: those that are there when it is entered."""
        return _fullest(self._entered + own + made, self._before + self.kept, made + (own - self._backward))


def _putting_off_no_more(put_off: Row, beside: Row, glue: bool) -> PassPeak:
    """W, from the last unit to the first: what still waits, and what is beside it for a moment.

    The glue before the first unit (an embedding) comes when nothing waits any more.
    """
    waiting = np.cumsum(put_off)
    totals = waiting + beside
    if glue:
        totals[0] = max(put_off[0], beside[0])
    return _fullest(totals, waiting)


def _incoming(rows: UnitColumns, first: int, end: int) -> float:
    """What other stages send; what only passes a stage by goes straight to where it is needed."""
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
    """Under shard 3, in forward and in backward of each unit: its weights, and those of the next that are coming.

    The loss, where the last unit has its peak, needs none.
    """
    own = rows.gathered[first:end]
    following, preceding = np.append(own[1:], 0.0), np.append(0.0, own[:-1])
    loss = np.arange(first, end) == rows.count - 1
    return np.where(loss, 0.0, np.stack([own + following, own + preceding]))


# ---- gradients that leave while backward runs ----


def _gone(made: Row | float, terms: StageMemoryOptions) -> Any:
    """Of so many bytes of gradients, those whose buckets are full."""
    full = FIRST_BUCKET + np.floor(np.maximum(np.asarray(made) - FIRST_BUCKET, 0.0) / terms.bucket) * terms.bucket
    return np.where(np.asarray(made) < FIRST_BUCKET, 0.0, full)


def _in_buckets(after: Row, terms: StageMemoryOptions) -> Row:
    """When backward enters each unit: gradients that wait for their bucket to fill, messages, and shards' own."""
    if not terms.bucket:
        return after
    gone = _gone(after, terms)
    under_way = np.minimum(gone, UNDER_WAY * terms.bucket)
    arrived = (gone - under_way) / terms.ranks if terms.level else 0.0
    return np.asarray(after - gone + terms.messages * under_way + arrived)


def _closing(made: float, terms: StageMemoryOptions) -> PassPeak:
    if not terms.bucket:
        return PassPeak(made, 0.0, made)
    gone = float(_gone(max(made - 1.0, 0.0), terms))
    left = made - gone
    under_way = min(gone, UNDER_WAY * terms.bucket)
    arrived = (gone - under_way) / terms.ranks if terms.level else 0.0
    return PassPeak(left + terms.messages * (left + under_way) + arrived, 0.0, left + arrived)
