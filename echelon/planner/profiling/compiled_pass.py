"""A traced pass as torch.compile would run it: operations fused, and fewer tensors saved for backward.

The rules are those of its partitioner and scheduler, as far as time and memory depend on them:

- elementwise operations, copies and reductions that follow each other are one kernel, which reads and writes only what
  other kernels need;
- backward recomputes what fused operations can make from saved tensors, if no other kernel needs it as a whole; what is
  saved is the minimum cut between the tensors that cannot be recomputed and those that backward reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from echelon.fastpath.padded_vocab import LARGE, MULTIPLE
from echelon.planner.profiling.fake_step import FakePass, UnitCall
from echelon.planner.profiling.kernel_costs import KernelLaunch
from echelon.planner.profiling.op_tracer import MemoryEvent, OpSpan

#: A result this many times smaller than what it was made of is saved, as the partitioner does with sums and means.
REDUCED = 4
#: Cost of saving a tensor that no kernel of forward would write otherwise.
UNWRITTEN = 2.0


def compile_pass(passed: FakePass) -> FakePass:
    """Return the pass with the spans of compiled code; equal calls share them, as before."""
    weights = set(passed.weights)
    made: dict[int, UnitCall] = {}
    calls = []
    for call in passed.calls:
        outer, outer_back = compile_spans(call.outer, call.outer_back, weights, {number for number, _ in call.inputs})
        unit, unit_back = call.unit, call.unit_back
        if call.like is None:
            unit, unit_back = compile_spans(unit, unit_back, weights, {number for number, _ in call.outputs})
        like = None if call.like is None else made[id(call.like)]
        calls.append(
            dataclasses.replace(call, outer=outer, outer_back=outer_back, unit=unit, unit_back=unit_back, like=like)
        )
        made[id(call)] = calls[-1]
    tail, tail_back = compile_spans(passed.tail, passed.tail_back, weights, set())
    tail = dataclasses.replace(tail, launches=list(_padded(tail.launches)))
    tail_back = dataclasses.replace(tail_back, launches=list(_padded(tail_back.launches)))
    return dataclasses.replace(passed, calls=calls, tail=tail, tail_back=tail_back)


def compile_spans(there: OpSpan, back: OpSpan, weights: set[int], outputs: Collection[int]) -> tuple[OpSpan, OpSpan]:
    """Return forward and backward of one compiled function; ``outputs``: storages that it returns."""
    if not there.launches:
        return there, back
    sizes = {**back.sizes, **there.sizes, **there.saved}
    wanted = set(there.saved) - weights
    saved = minimum_cut(there, back, sizes, weights)
    again = _ancestors(there, saved | weights)
    needed = saved | set(outputs) | there.writes
    forward = fuse(there.launches, sizes, needed, back=False)
    backward = fuse(
        [_reading(launch, wanted - saved, again) for launch in back.launches], sizes, _results(back), back=True
    )
    there_events, back_events = _events(there, back, wanted, saved, (forward, backward))
    kept = {number: sizes[number] for number in sorted(saved)}
    return (
        dataclasses.replace(there, launches=forward, events=there_events, saved=kept),
        dataclasses.replace(back, launches=backward, events=back_events),
    )


def _padded(launches: Iterable[KernelLaunch]) -> Iterator[KernelLaunch]:
    """Yield launches, and the copies around an output layer of unaligned size, which a run pads."""
    for launch in launches:
        yield launch
        if launch.kind != "product" or launch.dtype not in ("bfloat16", "float16"):
            continue
        batch, m, n, k = launch.shape
        if n * k >= LARGE and n % MULTIPLE:  # out of the padded result
            yield KernelLaunch("layout", 0.0, 4.0 * batch * m * n, (), launch.dtype)
        elif n * k >= LARGE and k % MULTIPLE:  # into a padded gradient of zeros
            yield KernelLaunch("copy", 0.0, 2.0 * batch * m * k, (), launch.dtype)
            yield KernelLaunch("layout", 0.0, 4.0 * batch * m * k, (), launch.dtype)


# ---- what is saved ----


def minimum_cut(there: OpSpan, back: OpSpan, sizes: dict[int, float], weights: set[int]) -> set[int]:
    """Return the storages that forward saves, without weights."""
    import networkx as nx

    wanted = set(there.saved) - weights
    whole = {number for launch in back.launches if not launch.is_fusable for number in launch.read}
    read_whole = {number for launch in there.launches if not launch.is_fusable for number in launch.read}
    made_by = {number: launch for launch in there.launches for number in launch.made}
    graph = nx.DiGraph()
    numbers = wanted | {number for launch in there.launches for number in (*launch.made, *launch.read)}
    for number in sorted(numbers):
        maker = made_by.get(number)
        written = maker is None or not maker.is_fusable or number in read_whole
        cost = 0.0 if number in weights else sizes.get(number, 0.0) * (1.0 if written else UNWRITTEN)
        graph.add_edge((number, "in"), (number, "out"), capacity=cost)
        if maker is None or number in whole or not _can_repeat(maker, number, there, sizes):
            graph.add_edge("source", (number, "in"), capacity=math.inf)
        else:
            for source in _sources(maker, number, there):
                graph.add_edge((source, "out"), (number, "in"), capacity=math.inf)
    if not wanted:
        return set()
    for number in sorted(wanted):
        graph.add_edge((number, "out"), "sink", capacity=math.inf)
    if "source" not in graph:
        return wanted
    _, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    return {number for number in numbers - weights if (number, "in") in reached and (number, "out") not in reached}


def _can_repeat(maker: KernelLaunch, number: int, there: OpSpan, sizes: dict[int, float]) -> bool:
    if not maker.is_fusable:
        return False
    if number in there.draws and number != maker.made[0]:  # the mask of a dropout, which makes its result again
        return False
    if number in there.draws and len(maker.made) == 1:
        return False
    return sizes.get(number, 0.0) * REDUCED >= sum(sizes.get(source, 0.0) for source in set(maker.read))


def _sources(maker: KernelLaunch, number: int, there: OpSpan) -> Iterable[int]:
    """Return what a result is made of: what the launch reads, and its other small results, such as a mask or a mean."""
    others = maker.made if number in there.draws or maker.kind in ("normalization", "batch_norm") else ()
    return {*maker.read, *others} - {number}


def _ancestors(there: OpSpan, present: Collection[int]) -> dict[int, set[int]]:
    """Return for each storage that forward makes the present ones from which fused operations make it again."""
    found: dict[int, set[int]] = {}
    for launch in there.launches:
        sources: set[int] = set()
        for number in launch.read:
            sources |= {number} if number in present else found.get(number, {number})
        for number in launch.made:
            found[number] = sources if launch.is_fusable else {number}
    return found


def _reading(launch: KernelLaunch, dropped: Collection[int], again: dict[int, set[int]]) -> KernelLaunch:
    """Return a launch of backward that reads the sources of the tensors that forward has not saved."""
    if not any(number in dropped for number in launch.read):
        return launch
    read = dict.fromkeys(
        source for number in launch.read for source in (sorted(again[number]) if number in dropped else (number,))
    )
    return dataclasses.replace(launch, read=tuple(read))


# ---- what is one kernel ----


def fuse(
    launches: Sequence[KernelLaunch], sizes: dict[int, float], needed: Collection[int], back: bool
) -> list[KernelLaunch]:
    """Return the launches with fusable ones joined.

    Launches are joined if one reads what the other makes and no other kernel must run between them.

    needed: storages that are read after all of them
    back:   True for launches of backward, in which a normalization also sums over rows for its weights
    """
    groups = _groups(launches)
    readers: dict[int, set[int]] = {}
    for at, launch in enumerate(launches):
        for number in launch.read:
            readers.setdefault(number, set()).add(groups[at])
    members: dict[int, list[KernelLaunch]] = {}
    for at, launch in enumerate(launches):
        members.setdefault(groups[at], []).append(launch)
    return [
        group[0] if not group[0].is_fusable else _joined(group, key, sizes, readers, needed, back)
        for key, group in members.items()
    ]


def _groups(launches: Sequence[KernelLaunch]) -> list[int]:
    """Return for each launch the index of the first launch of its kernel."""
    depths = _depths(launches)
    maker: dict[int, int] = {}  # storage -> index of the launch that makes it
    group = list(range(len(launches)))
    for at, launch in enumerate(launches):
        if _is_joined(launch):
            for number in launch.read:
                before = maker.get(number)
                if before is not None and _is_joined(launches[before]) and depths[before] == depths[at]:
                    _join(group, group[before], group[at])
        maker.update(dict.fromkeys(launch.made, at))
    return group


def _depths(launches: Sequence[KernelLaunch]) -> list[int]:
    """Return for each launch the number of kernels that must run before it; a function waits for its first reader."""
    after: dict[int, int] = {}  # storage -> number of kernels that must run before it can be read
    depths = []
    for launch in launches:
        depths.append(max((after.get(number, 0) for number in launch.read), default=0))
        after.update(dict.fromkeys(launch.made, depths[-1] + (not _is_joined(launch))))
    first: dict[int, int] = {}  # storage -> the least depth of its readers
    for at in range(len(launches) - 1, -1, -1):
        launch = launches[at]
        readers = [first[number] for number in launch.made if number in first]
        if _is_joined(launch) and readers:
            depths[at] = max(depths[at], min(readers))
        for number in launch.read:
            first[number] = min(first.get(number, depths[at]), depths[at])
    return depths


def _is_joined(launch: KernelLaunch) -> bool:
    """Return True if a launch can share a kernel; sums over rows go through their operand in another order."""
    return launch.is_fusable and not launch.over_rows


def _join(group: list[int], one: int, other: int) -> None:
    first, second = min(one, other), max(one, other)
    if first != second:
        group[:] = [first if each == second else each for each in group]


def _joined(
    group: Sequence[KernelLaunch],
    key: int,
    sizes: dict[int, float],
    readers: dict[int, set[int]],
    needed: Collection[int],
    back: bool,
) -> KernelLaunch:
    """Return one launch for a group: it reads what others made, and writes what others read."""
    inside = {number for launch in group for number in launch.made}
    read = tuple(dict.fromkeys(number for launch in group for number in launch.read if number not in inside))
    made = tuple(number for number in inside if number in needed or readers.get(number, set()) - {key}) or tuple(
        group[-1].made
    )
    moved = sum(sizes.get(number, 0.0) for number in (*read, *made))
    summed = ("batch_norm", "normalization") if back else ("batch_norm",)  # sums over rows are a pass of their own
    moved += sum(sizes.get(number, 0.0) for launch in group if launch.kind in summed for number in set(launch.read))
    largest = max(group, key=lambda launch: launch.bytes)
    return KernelLaunch(
        kind="pointwise",
        flops=largest.flops,
        bytes=min(moved, sum(launch.bytes for launch in group)),
        shape=(),
        dtype=largest.dtype,
        made=made,
        read=read,
        for_weights=all(launch.for_weights for launch in group),
    )


def _results(back: OpSpan) -> set[int]:
    """Return the storages that backward makes and nothing in it reads: gradients."""
    read = {number for launch in back.launches for number in launch.read}
    return {number for launch in back.launches for number in launch.made if number not in read} | back.writes


# ---- memory ----


def _events(
    there: OpSpan, back: OpSpan, wanted: set[int], saved: set[int], run: tuple[list[KernelLaunch], list[KernelLaunch]]
) -> tuple[list[MemoryEvent], list[MemoryEvent]]:
    """Return the memory events of both passes without storages that compiled code (``run``) does not write.

    What forward does not save any more is freed at its end, what it saves in its place at the end of backward.
    """
    sizes = {event.storage: event.bytes for event in there.events if event.bytes > 0}
    forward = _written(there, run[0], saved)
    freed = {event.storage for event in forward if event.bytes < 0}
    forward = [event for event in forward if event.bytes > 0 or event.storage not in saved - wanted]
    present = {event.storage for event in forward if event.bytes > 0}
    dropped = (wanted - saved) & sizes.keys()
    forward += [MemoryEvent(number, -sizes[number]) for number in sorted(dropped & present - freed)]
    backward = [event for event in _written(back, run[1], ()) if event.storage not in dropped]
    backward += [MemoryEvent(number, -sizes[number]) for number in sorted((saved - wanted) & present & freed)]
    return forward, backward


def _written(span: OpSpan, run: Sequence[KernelLaunch], kept: Collection[int]) -> list[MemoryEvent]:
    """Return the events of a span without those of storages that only live inside a fused kernel."""
    before = {number for launch in span.launches for number in launch.made}
    after = {number for launch in run for number in launch.made}
    inside = before - after - set(kept)
    return [event for event in span.events if event.storage not in inside]
