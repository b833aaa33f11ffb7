"""Computes bytes, time and bandwidth of each kind of communication, and the waits that late ranks cause.

The ends of a message have the same key on all its ranks. Its transfer cannot start before the last rank has arrived:
the time after that is transfer, and the wait of other ranks before that is charged to the last rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from echelon.observability.trace.intervals import Interval
from echelon.observability.trace.span import NETWORK, Span
from echelon.observability.trace.trace_files import RankTrace

End = tuple[int, Span]  #: a rank and its end of a message
#: Seconds. If the backend does not report the end of a message, the end of the wait for it is used. If the wait was
#: shorter than this, the message had arrived at some unknown time before.
AT_ONCE = 5e-5


@dataclass(frozen=True)
class MatchedComm:
    """All ends of one message or collective."""

    ends: tuple[End, ...]

    @property
    def since(self) -> float:
        """The earliest start of the transfer, when all ranks have arrived; a receiver may have arrived long before."""
        return max(span.begin for _, span in self.ends)

    @property
    def last(self) -> int:
        """The rank that arrived last."""
        return max(self.ends, key=lambda end: end[1].begin)[0]

    def transfer(self, span: Span) -> Interval | None:
        """Return the interval of the transfer as seen by one rank; ``None`` if its end is unknown."""
        unseen = span.lane == NETWORK and "told" not in span.more
        if unseen and (span.more.get("at") == "sender" or span.end - span.more.get("waited", span.begin) < AT_ONCE):
            return None
        return min(max(span.begin, self.since), span.end), span.end

    def rate(self, span: Span) -> float | None:
        """Return the bytes per second as seen by one rank; None if unknown."""
        seen = self.transfer(span)
        return span.bytes / (seen[1] - seen[0]) if seen and span.bytes and seen[1] > seen[0] else None


def messages_of(ranks: Sequence[RankTrace]) -> list[MatchedComm]:
    found: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
    for ranked in ranks:
        for span in ranked.spans:
            if span.kind == "communicate" and "key" in span.more:
                found[span.ranks or "", str(span.more["key"])].append((ranked.rank, span))
    return [MatchedComm(tuple(ends)) for ends in found.values()]


def transfers(messages: Sequence[MatchedComm]) -> dict[int, list[Interval]]:
    """Return the intervals of all transfers of each rank."""
    found: defaultdict[int, list[Interval]] = defaultdict(list)
    for message in messages:
        for rank, span in message.ends:
            found[rank] += [seen] if (seen := message.transfer(span)) is not None else []
    return found


def lateness(messages: Sequence[MatchedComm]) -> dict[tuple[int, int], float]:
    """Return the seconds of waiting for late ranks, by (waiting rank, late rank)."""
    found: defaultdict[tuple[int, int], float] = defaultdict(float)
    for message in messages:
        for rank, span in message.ends:
            waited = span.more.get("waited")
            if rank != message.last and isinstance(waited, float):
                found[rank, message.last] += max(0.0, min(message.since, span.end) - waited)
    return dict(found)


def table(messages: Sequence[MatchedComm], ranks: Sequence[RankTrace], steps: int) -> list[dict[str, Any]]:
    """Return bytes and milliseconds per step on a participating rank, and bandwidth, for each kind of communication.

    Messages with an unknown end count in the bytes only.
    """
    moved: defaultdict[str, list[_TransferSample]] = defaultdict(list)
    for message in messages:
        for rank, span in message.ends:
            if span.more.get("at") != "sender":  # messages are counted at the receiver
                seen = message.transfer(span)
                moved[span.name].append(_TransferSample(rank, span.bytes or 0, seen[1] - seen[0] if seen else None))
    for ranked in ranks:
        for span in ranked.spans:
            if span.lane == "network" and span.kind in ("pull", "push"):
                moved[f"{span.kind} (servers)"].append(_TransferSample(ranked.rank, span.bytes or 0, span.seconds))
    return sorted((_row(name, ends, steps) for name, ends in moved.items()), key=lambda row: -float(row["ms"]))


class _TransferSample(NamedTuple):
    rank: int
    bytes: int
    seconds: float | None


def _row(name: str, moved: Sequence[_TransferSample], steps: int) -> dict[str, Any]:
    shared = max(1, steps) * len({one.rank for one in moved})
    seconds = sum(one.seconds for one in moved if one.seconds is not None)
    seen = sum(one.bytes for one in moved if one.seconds is not None)
    return {
        "name": name,
        "bytes": round(sum(one.bytes for one in moved) / shared),
        "ms": 1e3 * seconds / shared,
        "gb_per_s": seen / seconds / 1e9 if seconds > 0 else None,
    }


def wait_seconds_by_culprit(late: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Return, by rank, the seconds that other ranks waited for it."""
    found: defaultdict[int, float] = defaultdict(float)
    for (_, last), seconds in late.items():
        found[last] += seconds
    return dict(found)
