"""Memory peaks of a unit, replayed from its memory events: with weight gradients kept, and with recompute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from echelon.planner.profiling.fake_step import FakePass, UnitCall
from echelon.planner.profiling.op_tracer import MemoryEvent, OpSpan

RECENT = 2  # results that are still needed if nothing is saved: an operation's input and its output

Pair = tuple[OpSpan, OpSpan]  # the same span of a smaller and of a larger batch


@dataclass(frozen=True)
class UnitSpans:
    """A unit's spans, in order.

    outer:  user code before each call of the unit
    module: the calls themselves
    tail:   code after the last unit
    """

    outer: tuple[Pair, ...]
    module: tuple[Pair, ...]
    tail: tuple[Pair, ...]


def figures_again(
    passes: tuple[FakePass, FakePass], groups: Sequence[Sequence[int]], index: int, at: float
) -> dict[str, float]:
    """Return the fields of a ModelUnit that concern recompute, weight gradients and casts.

    at: position for interpolation: 0 is the first pass, 1 the second
    """
    small, large = passes
    calls = [(small.calls[one], large.calls[one]) for one in groups[index]]
    is_last = index == len(groups) - 1
    tail = ((small.tail, large.tail),) if is_last else ()
    tail_back = ((small.tail_back, large.tail_back),) if is_last else ()
    there = UnitSpans(
        tuple((a.outer, b.outer) for a, b in calls), tuple((a.measured.unit, b.measured.unit) for a, b in calls), tail
    )
    back = UnitSpans(
        tuple((a.outer_back, b.outer_back) for a, b in calls),
        tuple((a.measured.unit_back, b.measured.unit_back) for a, b in calls),
        tail_back,
    )
    outputs = [{number for number, _ in a.measured.outputs} for a, _ in calls]
    return {
        "backward_whole": peak_with_gradients(back, small.gradients, at),
        "kept": _kept(small, large, calls, there, at),
        "forward_again": forward_again(there, outputs, at),
        "backward_again": backward_again(there, back, outputs, small.gradients, at, whole=False),
        "backward_again_whole": backward_again(there, back, outputs, small.gradients, at, whole=True),
        "deferred": deferred(there, back, small.weights, at),
        "casts": casts(there, small.weights, at),
    }


def crossings(passed: FakePass, groups: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each unit, the bytes of tensors that earlier units made and that it or a later one uses."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    sizes: dict[int, float] = {}
    for index, group in enumerate(groups):
        for call in (passed.calls[at] for at in group):
            for number in call.outer.reads | {number for number, _ in call.inputs}:
                last[number] = index
            for number, size in call.outputs:
                first.setdefault(number, index)
                sizes[number] = size
    for number in passed.tail.reads & sizes.keys():
        last[number] = len(groups) - 1
    return [
        sum(size for number, size in sizes.items() if first[number] < index <= last.get(number, -1))
        for index in range(len(groups))
    ]


def _kept(
    small: FakePass, large: FakePass, calls: Sequence[tuple[UnitCall, UnitCall]], there: UnitSpans, at: float
) -> float:
    """Return the bytes of the module's inputs and of tensors saved by user code, each storage once.

    Weights and the batch are not counted.
    """
    found: dict[int, float] = {}
    for a, b in calls:
        for (number, one), (_, other) in zip(a.inputs, b.inputs, strict=True):
            found[number] = between(one, other, at)
    for one_span, other_span in (*there.outer, *there.tail):
        for (number, one), other in zip(one_span.saved.items(), other_span.saved.values(), strict=True):
            found[number] = max(found.get(number, 0.0), between(one, other, at))
    return sum(size for number, size in found.items() if number not in small.weights and number not in small.batch)


class MemoryLevel:
    """The bytes allocated since the beginning, and their peak."""

    def __init__(self, at: float) -> None:
        self._at = at
        self.now = self.peak = 0.0
        self._begun = False

    def play(self, pairs: Iterable[Pair], stay: Collection[int] = (), without: Collection[int] = ()) -> None:
        """Replay the memory events of the spans.

        stay:    storages that are never freed
        without: storages that are ignored
        """
        for one, other in _events(pairs):
            if one.storage in without or (one.bytes < 0 and one.storage in stay):
                continue
            self._begun |= one.bytes > 0
            if self._begun:  # memory freed before the first allocation belongs to the previous unit
                self.now += between(one.bytes, other.bytes, self._at)
                if not one.late:
                    self.peak = max(self.peak, self.now)
        self.peak = max(self.peak, self.now)

    def play_unkept(self, pair: Pair, outputs: Collection[int]) -> None:
        """Replay a module that saves nothing: each result is freed soon after its use, except the outputs."""
        kept = pair[0].saved
        entered = self.now
        sizes: dict[int, float] = {}
        recent: list[int] = []
        for one, other in _events([pair]):
            size = between(one.bytes, other.bytes, self._at)
            if one.bytes > 0:
                sizes[one.storage] = size
                recent = [*recent, one.storage][-RECENT:] if one.storage in kept else recent
            else:
                sizes.pop(one.storage, None)
            alive = [number for number in sizes if number not in kept or number in recent or number in outputs]
            self.peak = max(self.peak, entered + sum(sizes[number] for number in alive))
        self.now = entered + sum(size for number, size in sizes.items() if number in outputs)


def between(one: float, other: float, at: float) -> float:
    return one + (other - one) * at


def _events(pairs: Iterable[Pair]) -> Iterator[tuple[MemoryEvent, MemoryEvent]]:
    for small, large in pairs:
        yield from zip(small.events, large.events, strict=True)


def peak_with_gradients(back: UnitSpans, gradients: Collection[int], at: float) -> float:
    """Return the peak of backward if gradients of weights stay."""
    level = MemoryLevel(at)
    level.play(_way_back(back), stay=gradients)
    return level.peak


def _way_back(back: UnitSpans) -> Iterator[Pair]:
    yield from back.tail
    for module, outer in zip(reversed(back.module), reversed(back.outer), strict=True):
        yield module
        yield outer


# ---- recomputed ----


def forward_again(there: UnitSpans, outputs: Sequence[Collection[int]], at: float) -> float:
    """Return the peak of forward if the module saves nothing inside it."""
    level = MemoryLevel(at)
    for outer, module, made in zip(there.outer, there.module, outputs, strict=True):
        level.play([outer])
        level.play_unkept(module, made)
    level.play(there.tail)
    return level.peak


def backward_again(
    there: UnitSpans,
    back: UnitSpans,
    outputs: Sequence[Collection[int]],
    gradients: Collection[int],
    at: float,
    whole: bool,
) -> float:
    """Return the peak of backward if the module's forward runs again before its backward.

    whole: True if gradients of weights stay and are counted
    """
    stay, without = (gradients, ()) if whole else ((), gradients)
    level = MemoryLevel(at)
    level.play(back.tail, stay, without)
    calls = zip(there.module, back.module, back.outer, outputs, strict=True)
    for module, module_back, outer_back, made in reversed(list(calls)):
        # Recompute stops once the last saved tensor exists again. Outputs that the module does not save are not made
        # again: other units save them, if needed.
        level.play([module], without=[number for number in made if number not in module[0].saved])
        level.play([module_back, outer_back], stay, without)
    return level.peak


def deferred(there: UnitSpans, back: UnitSpans, weights: Collection[int], at: float) -> float:
    """Return the bytes that the kernels of weight gradients read, each storage once."""
    sizes: dict[int, float] = {}
    pairs = (*there.outer, *there.module, *there.tail, *back.outer, *back.module, *back.tail)
    for small, large in pairs:
        for one, other in zip(small.events, large.events, strict=True):
            if one.bytes > 0:
                sizes[one.storage] = between(one.bytes, other.bytes, at)
        for (number, one_size), other_size in zip(small.saved.items(), large.saved.values(), strict=True):
            sizes.setdefault(number, between(one_size, other_size, at))
    read = {
        number
        for small, _ in pairs
        for launch in small.launches
        if launch.for_weights and launch.kind in ("product", "convolution", "lookup")
        for number in launch.read
    }
    return sum(sizes[number] for number in read if number in sizes and number not in weights)


def casts(there: UnitSpans, weights: Collection[int], at: float) -> float:
    """Return the bytes of copies of weights in another precision."""
    found = 0.0
    for small, large in (*there.outer, *there.module, *there.tail):
        sizes = {
            one.storage: between(one.bytes, other.bytes, at)
            for one, other in zip(small.events, large.events, strict=True)
            if one.bytes > 0
        }
        found += sum(
            sizes.get(number, 0.0)
            for launch in small.launches
            if launch.kind == "copy" and len(launch.read) == 1 and launch.read[0] in weights
            for number in launch.made
        )
    return found
