"""Costs of units, interpolated from two fake passes: costs are affine in the number of samples, so two sizes suffice.

Memory peaks are not affine, because each is a maximum of affine sums. So the memory events are interpolated one by one
and replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from echelon.plan.batch_norms import BatchNorm
from echelon.planner.model_costs import Kernel, ModelUnit, SplitCollective, UnitPass
from echelon.planner.profiling.fake_copy import FakeModel
from echelon.planner.profiling.fake_step import FakePass, UnitCall
from echelon.planner.profiling.op_tracer import MemoryEvent, OpSpan

Groups = Sequence[Sequence[int]]  # for each unit, the indices of its calls


@dataclass
class UnitTensors:
    """The tensors of the model that one unit needs, by id, and the entries of its batch-norm statistics."""

    parameters: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    norm_statistics: int = 0


# ---- grouping of calls into units ----


def group_calls(passed: FakePass) -> list[list[int]]:
    """Group calls into units.

    All calls between two calls of one module are one unit, and so are calls that must be in the same stage.
    """
    calls = passed.calls
    last = {call.name: at for at, call in enumerate(calls)}
    until = _bound(passed)
    groups: list[list[int]] = []
    reach = -1
    for at, call in enumerate(calls):
        if at > reach:
            groups.append([])
        reach = max(reach, last[call.name], until.get(at, at))
        groups[-1].append(at)
    return groups


def _bound(passed: FakePass) -> dict[int, int]:
    """Return, by call, the last call that must be in the same stage.

    That is a call that reads random numbers drawn by user code before the first call, or a tensor that the first call
    has modified in place.
    """
    made: dict[int, int] = {}  # a storage that another stage could not reproduce -> the call it belongs to
    outputs = {number for call in passed.calls for number, _ in call.outputs}
    until: dict[int, int] = {}
    for at, call in enumerate(passed.calls):
        seen = call.outer.reads | {number for number, _ in call.inputs}
        for number in seen & made.keys():
            until[made[number]] = max(until.get(made[number], at), at)
        _spread(call.outer, made, at)
        for number in call.outer.draws:
            made.setdefault(number, at)
        for place in _changed(call.measured):
            number = call.inputs[place][0]
            if number in outputs or number in passed.batch:
                made[number] = at
        for number, _ in call.outputs:
            made.pop(number, None)
    return until


def _spread(outer: OpSpan, made: dict[int, int], at: int) -> None:
    """Add the storages that user code between units derives from storages in ``made``."""
    for launch in outer.launches:
        origins = [made[number] for number in launch.read if number in made]
        origins += [at] if set(launch.made) & outer.draws else []
        for number in launch.made:
            if origins:
                made.setdefault(number, min(origins))


def _changed(call: UnitCall) -> list[int]:
    return [place for place, (number, _) in enumerate(call.inputs) if number in call.unit.writes]


# ---- tensors of each unit ----


def unit_tensors(original: nn.Module, shadow: FakeModel, passed: FakePass, groups: Groups) -> list[UnitTensors]:
    """Return the tensors that each unit needs, by id of the original tensor.

    The values are the fake model's tensors, which are parts of the original ones if the model is split.
    """
    held = [UnitTensors() for _ in groups]
    of_call = {at: index for index, group in enumerate(groups) for at in group}
    of_unit = {passed.calls[at].name: index for at, index in of_call.items()}
    originals: dict[int, list[int]] = {}
    for key, copied in shadow.stands_for.items():
        originals.setdefault(id(copied), []).append(key)

    def hold(index: int, key: int) -> None:
        copied = shadow.stands_for[key]
        space = held[index].parameters if isinstance(copied, nn.Parameter) else held[index].buffers
        space[key] = copied

    for index, span in _outer_spans(passed, of_call):
        for number in span.reads & passed.weights.keys():
            hold(index, originals[id(passed.weights[number])][0])
    place, found = 0, {key for one in held for key in (*one.parameters, *one.buffers)}
    for name, value in _named_tensors(original):
        inside = next((of_unit[prefix] for prefix in _prefixes(name) if prefix in of_unit), None)
        if inside is not None:
            place = min(inside + 1, len(groups) - 1)
            hold(inside, id(value))
        elif id(value) not in found:
            hold(place, id(value))
    _count_norms(original, of_unit, held)
    return held


def _count_norms(original: nn.Module, of_unit: dict[str, int], held: list[UnitTensors]) -> None:
    for name, module in original.named_modules():
        if isinstance(module, BatchNorm):
            inside = next((of_unit[prefix] for prefix in _prefixes(f"{name}.") if prefix in of_unit), 0)
            held[inside].norm_statistics += 2 * module.num_features + 1


def _outer_spans(passed: FakePass, of_call: dict[int, int]) -> Iterable[tuple[int, OpSpan]]:
    for at, call in enumerate(passed.calls):
        yield of_call[at], call.outer
    yield max(of_call.values(), default=0), passed.tail


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return ["", *(".".join(parts[:end]) for end in range(1, len(parts)))]


# ---- bytes between units ----


@dataclass(frozen=True)
class UnitActivationBytes:
    """Bytes of one unit that are saved for backward, received and passed on."""

    saved: float
    received: float
    output: float


def carried(passed: FakePass, groups: Groups) -> list[UnitActivationBytes]:
    of_call = {at: index for index, group in enumerate(groups) for at in group}
    makers: dict[int, int] = {}
    sizes: dict[int, float] = {}
    for at, call in enumerate(passed.calls):
        for number, size in call.outputs:
            makers.setdefault(number, of_call[at])
            sizes[number] = size
    saved = _saved(passed, groups, makers)
    received = [0.0] * len(groups)
    handed_on: list[set[int]] = [set() for _ in groups]
    for index in range(len(groups)):
        incoming = {number for number in _seen(passed, groups, index) if makers.get(number, index) < index}
        for number in incoming:
            handed_on[makers[number]].add(number)
        received[index] = sum(sizes[number] for number in incoming)
    if groups:
        received[0] = _batch_bytes(passed, groups[0])
        handed_on[-1] = {number for number, _ in passed.calls[groups[-1][-1]].outputs}
    output = [sum(sizes[number] for number in numbers) for numbers in handed_on]
    return [UnitActivationBytes(*each) for each in zip(saved, received, output, strict=True)]


def _seen(passed: FakePass, groups: Groups, index: int) -> set[int]:
    """Return the storages that the unit and the user code before it read."""
    found: set[int] = set(passed.tail.reads) if index == len(groups) - 1 else set()
    for at in groups[index]:
        call = passed.calls[at]
        found |= call.outer.reads | {number for number, _ in call.inputs}
    return found


def _batch_bytes(passed: FakePass, group: Sequence[int]) -> float:
    inputs = {number: size for at in group for number, size in passed.calls[at].inputs}
    return sum(size for number, size in inputs.items() if number in passed.batch)


def _saved(passed: FakePass, groups: Groups, makers: dict[int, int]) -> list[float]:
    """Return the bytes that each unit saves.

    Each storage is counted once in total: for the first unit that saves it after the one that made it, or else for the
    one that made it.
    """
    savers: dict[int, list[int]] = {}
    sizes: dict[int, float] = {}
    totals = [0.0] * len(groups)
    for index, group in enumerate(groups):
        for at in group:
            call = passed.calls[at]
            inside, kept = _kept(call, passed)
            totals[index] += inside
            kept |= call.outer.saved
            kept |= passed.tail.saved if index == len(groups) - 1 and at == group[-1] else {}
            for number, size in kept.items():
                if number not in passed.weights:
                    savers.setdefault(number, []).append(index)
                    sizes[number] = size
    for number, found in savers.items():
        later = [index for index in found if index > makers.get(number, -1)]
        totals[(later or found)[0]] += sizes[number]
    return totals


def _kept(call: UnitCall, passed: FakePass) -> tuple[float, dict[int, float]]:
    """Return the bytes of internal tensors that the unit saves, and the saved inputs and outputs by storage."""
    like = call.measured
    saved = {number: size for number, size in like.unit.saved.items() if number not in passed.weights}
    known = {number: saved[number] for number, _ in (*like.inputs, *like.outputs) if number in saved}
    inside = sum(size for number, size in saved.items() if number not in known)
    shared = {}
    for old, new in ((like.inputs, call.inputs), (like.outputs, call.outputs)):
        for (number, _), (other, _) in zip(old, new, strict=True):
            if number in known:
                shared[other] = known[number]
    return inside, shared


# ---- one unit ----


@dataclass(frozen=True)
class UnitPassSpans:
    """The forward and backward spans of one unit in one pass."""

    forward: tuple[OpSpan, ...]
    backward: tuple[OpSpan, ...]
    gradients: frozenset[int] | set[int]


def spans_of(passed: FakePass, groups: Groups, index: int) -> UnitPassSpans:
    calls = [passed.calls[at] for at in groups[index]]
    forward = [span for call in calls for span in (call.outer, call.measured.unit)]
    backward = [span for call in reversed(calls) for span in (call.measured.unit_back, call.outer_back)]
    if index == len(groups) - 1:
        forward.append(passed.tail)
        backward.insert(0, passed.tail_back)
    return UnitPassSpans(tuple(forward), tuple(backward), passed.gradients)


def identity(passed: FakePass, groups: Groups, index: int) -> tuple[int, ...]:
    """Return a key that is equal for units with equal operations."""
    calls = [passed.calls[at] for at in groups[index]]
    if index == len(groups) - 1 and not (passed.tail.is_quiet and passed.tail_back.is_quiet):
        return (id(passed),)
    return tuple(id(call.measured if call.outer.is_quiet and call.outer_back.is_quiet else call) for call in calls)


def alike(small: UnitPassSpans, large: UnitPassSpans) -> bool:
    """Return True if both passes ran the same operations, so that costs can be interpolated between them."""
    pairs = zip((*small.forward, *small.backward), (*large.forward, *large.backward), strict=True)
    return all(_same_steps(one, other) for one, other in pairs)


def _same_steps(one: OpSpan, other: OpSpan) -> bool:
    kinds = [launch.kind for launch in one.launches] == [launch.kind for launch in other.launches]
    signs = [event.bytes > 0 for event in one.events] == [event.bytes > 0 for event in other.events]
    return kinds and signs and len(one.messages) == len(other.messages)


def unit(name: str, small: UnitPassSpans, large: UnitPassSpans, at: float, figures: dict[str, float]) -> ModelUnit:
    """Return the unit's costs, interpolated: ``at`` 0 gives those of ``small``, 1 those of ``large``."""
    return ModelUnit(
        name=name,
        forward=_pass(small.forward, large.forward, at),
        backward=_pass(small.backward, large.backward, at),
        again=_pass(small.forward[1::2], large.forward[1::2], at),  # the other spans are user code or the loss
        forward_peak=_peak(small.forward, large.forward, at, set()),
        backward_peak=_peak(small.backward, large.backward, at, small.gradients),
        **figures,
    )


def between(one: float, other: float, at: float) -> float:
    return one + (other - one) * at


def _pass(small: Sequence[OpSpan], large: Sequence[OpSpan], at: float) -> UnitPass:
    kernels: dict[Any, int] = {}
    messages: dict[Any, int] = {}
    for one, other in zip(small, large, strict=True):
        for a, b in zip(one.launches, other.launches, strict=True):
            shape = tuple(between(x, y, at) for x, y in zip(a.shape, b.shape, strict=True))
            key = (a.kind, between(a.flops, b.flops, at), between(a.bytes, b.bytes, at), shape, a.dtype, a.for_weights)
            kernels[key] = kernels.get(key, 0) + 1
        for (kind, x), (_, y) in zip(one.messages, other.messages, strict=True):
            message = (kind, between(x, y, at))
            messages[message] = messages.get(message, 0) + 1
    return UnitPass(
        tuple(_kernel(key, count) for key, count in kernels.items()),
        tuple(SplitCollective(kind, size, count) for (kind, size), count in messages.items()),
    )


def _kernel(key: Any, count: int) -> Kernel:
    kind, flops, size, shape, dtype, for_weights = key
    return Kernel(kind, flops, size, shape, dtype, count, for_weights)


def _peak(small: Sequence[OpSpan], large: Sequence[OpSpan], at: float, without: Iterable[int]) -> float:
    left_out = set(without)
    now = peak = 0.0
    begun = False
    for a, b in _events(small, large):
        if a.storage in left_out:
            continue
        begun |= a.bytes > 0
        if begun:  # memory freed before the first allocation belongs to the previous unit
            now += between(a.bytes, b.bytes, at)
            peak = peak if a.late else max(peak, now)
    return max(peak, now)


def _events(small: Sequence[OpSpan], large: Sequence[OpSpan]) -> Iterable[tuple[MemoryEvent, MemoryEvent]]:
    for one, other in zip(small, large, strict=True):
        yield from zip(one.events, other.events, strict=True)


def mark_weight_kernels(passed: FakePass) -> None:
    """Mark the kernels whose results all become a weight's gradient, are cast to one, or are added to one."""
    wanted = set(passed.gradients)
    for span in _backwards(passed):
        for launch in reversed(span.launches):
            if launch.made and all(number in wanted for number in launch.made):
                launch.for_weights = True
                if launch.kind in ("copy", "layout") or launch.is_sum:
                    wanted.update(launch.read)
                if launch.is_sum:  # a real run adds in place to the gradient from another use of the weight
                    passed.gradients.add(launch.read[0])


def _backwards(passed: FakePass) -> Iterable[OpSpan]:
    for call in passed.calls:
        yield call.outer_back
        yield call.unit_back
    yield passed.tail_back
