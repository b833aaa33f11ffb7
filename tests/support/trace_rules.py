"""Chrome's Trace Event Format as Perfetto reads it: what must hold for every slice and arrow to be drawn as meant.

Each rule was seen to matter in Perfetto's own trace processor: what breaks them is drawn elsewhere, without an error.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Times = tuple[int, int]
META = {
    "process_name": "name", "process_sort_index": "sort_index", "thread_name": "name", "thread_sort_index": "sort_index"
}  # fmt: skip


def check_trace(trace: Any) -> list[Event]:
    """All of them; returns the slices."""
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    for event in events:
        _check_event(event)
    slices = [event for event in events if event["ph"] == "X"]
    _check_names(events)
    stacks = _check_nesting(slices)
    _check_arrows(events, stacks)
    return slices


def _check_event(event: Event) -> None:
    assert event["ph"] in {"X", "M", "s", "f"}
    assert isinstance(event["name"], str)
    assert event["name"]
    for number in ("pid", "tid"):  # 0 is the system's idle process and thread, whatever it is said to belong to
        assert isinstance(event[number], int)
        assert event[number] > 0
    assert isinstance(event["args"], dict)
    assert nanoseconds(event["ts"]) >= 0
    if event["ph"] == "X":
        assert nanoseconds(event["dur"]) >= 0
        assert event["cat"]


def nanoseconds(microseconds: float) -> int:
    """Viewers count in them: what is finer is cut off, and may then lie half outside of what it is in."""
    whole = round(1e3 * microseconds)
    assert abs(1e3 * microseconds - whole) < 1e-3
    return whole


def _check_names(events: list[Event]) -> None:
    told = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    assert len(told) == sum(event["ph"] == "M" for event in events)
    for event in events:
        if event["ph"] == "M":
            assert event["args"].keys() == {META[event["name"]]}
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    assert all(("thread_name", pid, tid) in told for pid, tid in threads)
    assert {pid for pid, _ in threads} <= {pid for name, pid, _ in told if name == "process_name"}


def _check_nesting(slices: list[Event]) -> dict[tuple[int, int], list[Times]]:
    """On one thread, slices lie inside each other or apart; one that is inside comes after what it is in."""
    threads: defaultdict[tuple[int, int], list[Times]] = defaultdict(list)
    for event in slices:
        begin = nanoseconds(event["ts"])
        threads[event["pid"], event["tid"]].append((begin, begin + nanoseconds(event["dur"])))
    for times in threads.values():
        open_until: list[int] = []
        for begin, end in sorted(times, key=lambda each: (each[0], -each[1])):  # equal ones stay as they are written
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    return threads


def _check_arrows(events: list[Event], threads: dict[tuple[int, int], list[Times]]) -> None:
    """In pairs, each end in a slice, and the slice that an arrow leads to begins no earlier than that it comes from:
    Perfetto would turn it round."""
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert 2 * len(starts) == sum(event["ph"] in "sf" for event in events)
    for number, start in starts.items():
        end = ends[number]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert end["bp"] == "e"
        assert _slice_at(start, threads) <= _slice_at(end, threads)


def _slice_at(event: Event, threads: dict[tuple[int, int], list[Times]]) -> int:
    """When the innermost slice around it begins."""
    at = nanoseconds(event["ts"])
    return max(begin for begin, end in threads[event["pid"], event["tid"]] if begin <= at <= end)
