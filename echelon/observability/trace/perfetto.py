"""Exports one trace of all ranks for Perfetto and chrome://tracing: one process per rank, one thread per lane.

Spans of one thread must be nested or disjoint. On the host they are. Concurrent messages and streams get as many
threads as they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from echelon.observability.trace.span import DEVICE, HOST, NETWORK, Span
from echelon.observability.trace.trace_files import RankTrace
from echelon.observability.trace.traffic import messages_of

Event = dict[str, Any]
#: First thread number of each lane. Perfetto treats process 0 and thread 0 as those of the system, so the number 0 is
#: not used here.
_STEPS, _HOST, _DEVICE, _NETWORK = 1, 2, 100, 200
_HIDDEN = ("key", "at", "waited", "told", "phase")


def trace_of(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the trace in Chrome's format; time 0 is the start of the first span."""
    zero = min((span.begin for ranked in ranks for span in ranked.spans), default=0.0)
    messages = messages_of(ranks)
    rates = {id(span): rate for m in messages for _, span in m.ends if (rate := m.rate(span)) is not None}
    since = {id(span): min(m.since, span.end) for m in messages for _, span in m.ends if _receives(span)}
    events = [event for ranked in ranks for event in _process(ranked, zero, rates, since)]
    return {"traceEvents": [*events, *_arrows(ranks, zero, since)], "displayTimeUnit": "ms"}


def _receives(span: Span) -> bool:
    return span.more.get("at") == "receiver"


def _process(ranked: RankTrace, zero: float, rates: Mapping[int, float], since: Mapping[int, float]) -> Iterator[Event]:
    """Yield the events of one rank.

    zero:  start of the trace, seconds
    rates: bytes per second of messages, by the id of the span
    since: start of the transfer of received messages, by the id of the span
    """
    process = _process_of(ranked.rank)
    yield _named("process_name", process, _STEPS, name=_title(ranked))
    yield _named("process_sort_index", process, _STEPS, sort_index=ranked.rank)
    threads = {_STEPS: "steps", _HOST: "host"}
    for span in _steps(ranked):
        yield _slice(span, process, _STEPS, zero)
    for span, thread in _placed(ranked):
        threads.setdefault(thread, _thread_name(span, thread))
        yield _slice(span, process, thread, zero, rates.get(id(span)))
        if since.get(id(span), span.begin) > span.begin:
            arrival = Span("arrival", span.kind, span.lane, since[id(span)], span.end, span.step)
            yield _slice(arrival, process, thread, zero)
    for thread, name in threads.items():
        yield _named("thread_name", process, thread, name=name)
        yield _named("thread_sort_index", process, thread, sort_index=thread)


def _process_of(rank: int) -> int:
    return 1 + rank


def _title(ranked: RankTrace) -> str:
    at = ranked.about.get("at")
    mesh = ranked.about.get("mesh")
    sizes = mesh if isinstance(mesh, dict) else {}
    place = [f"{axis} {index}" for axis, index in at.items() if sizes.get(axis, 1) != 1] if isinstance(at, dict) else []
    words = [f"rank {ranked.rank}", str(ranked.about.get("host", "")), *place, str(ranked.about.get("device", ""))]
    return ", ".join(word for word in words if word)


def _thread_name(span: Span, thread: int) -> str:
    if span.lane == DEVICE:
        return f"device, stream {span.more.get('stream', 0)}"
    return "host" if span.lane == HOST else f"network {thread - _NETWORK + 1}"


def _steps(ranked: RankTrace) -> list[Span]:
    phases = [span for span in ranked.spans if "phase" in span.more]
    found = []
    for number in sorted({span.step for span in phases}):
        own = [span for span in phases if span.step == number]
        begin, end = min(span.begin for span in own), max(span.end for span in own)
        whole = any(span.name == "update" for span in own)
        name = f"step {number}" + ("" if whole else ", cut short")
        found.append(Span(name, kind="other", lane=HOST, begin=begin, end=end, step=number))
    return found


def _placed(ranked: RankTrace) -> Iterator[tuple[Span, int]]:
    """Yield every span with its thread."""
    for span in sorted((s for s in ranked.spans if s.lane == HOST), key=lambda s: (s.begin, -s.end)):
        yield span, _HOST
    streams = {str(span.more.get("stream", 0)) for span in ranked.spans if span.lane == DEVICE}
    numbers = {stream: _DEVICE + number for number, stream in enumerate(sorted(streams))}
    yield from ((s, numbers[str(s.more.get("stream", 0))]) for s in ranked.spans if s.lane == DEVICE)
    yield from ((span, _NETWORK + row) for span, row in _rows(s for s in ranked.spans if s.lane == NETWORK))


def _rows(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Assign each span to the first free row, so that overlapping spans are in different rows."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: span.begin):
        row = next((row for row, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.end]
        yield span, row


def _slice(span: Span, pid: int, tid: int, zero: float, rate: float | None = None) -> Event:
    args: dict[str, Any] = {"step": span.step}
    args |= {name: value for name, value in span.more.items() if name not in _HIDDEN}
    if span.ranks is not None:
        args["ranks"] = span.ranks
    if span.bytes is not None:
        args["bytes"] = span.bytes
    if rate is not None:
        args["GB/s"] = float(f"{rate / 1e9:.3g}")
    return {
        "ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid,
        "ts": _microseconds(span.begin, zero), "dur": _lasted(span, zero), "args": args,
    }  # fmt: skip


def _microseconds(at: float, zero: float) -> float:
    """Return microseconds since ``zero``, rounded to whole nanoseconds, so that adjacent spans stay adjacent."""
    return round(1e9 * (at - zero)) / 1e3


def _lasted(span: Span, zero: float) -> float:
    return (round(1e9 * (span.end - zero)) - round(1e9 * (span.begin - zero))) / 1e3


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _arrows(ranks: Sequence[RankTrace], zero: float, since: Mapping[int, float]) -> Iterator[Event]:
    """Yield arrows from the send of a message to its arrival.

    A receiver may have waited long before the send, and Perfetto draws arrows only forward in time. The arrow therefore
    points to the arrival, inside the receive. A message that ends before it begins, by the error of clocks, has none.
    """
    ends: dict[tuple[str, str], dict[str, tuple[int, int, Span]]] = {}
    for ranked in ranks:
        for span, thread in _placed(ranked):
            if span.more.get("at") in ("sender", "receiver"):
                key = span.ranks or "", str(span.more["key"])
                ends.setdefault(key, {})[span.more["at"]] = _process_of(ranked.rank), thread, span
    pairs = [found for found in ends.values() if len(found) == 2]
    forward = (both for both in pairs if since[id(both["receiver"][2])] >= both["sender"][2].begin)
    for number, both in enumerate(forward):
        for at, phase in (("sender", "s"), ("receiver", "f")):
            pid, tid, span = both[at]
            when = span.begin if at == "sender" else since[id(span)]
            event = {"ph": phase, "name": "message", "cat": "message", "id": number, "pid": pid, "tid": tid}
            yield event | {"ts": _microseconds(when, zero), "args": {}} | ({"bp": "e"} if phase == "f" else {})
