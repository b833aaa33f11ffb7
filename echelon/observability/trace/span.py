"""``Span``: an activity or a wait of one rank with begin and end. A trace is a list of spans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

#: Lanes of spans: the process, its GPU, and messages.
HOST, DEVICE, NETWORK = "host", "device", "network"
LANES = (HOST, DEVICE, NETWORK)
KINDS = (
    *("forward", "backward", "update", "communicate", "wait", "bubble"),
    *("data", "pull", "push", "other", "kernel"),
)  # fmt: skip


class Span(NamedTuple):
    """An activity or a wait of one rank.

    begin, end: seconds; on this process's clock during the trace, on rank 0's clock in files
    bytes:      bytes of a message
    ranks:      ranks of a message, such as ``0-3``
    more:       further fields of some spans:
                phase           True if the span is a phase of the step; phases have no gaps between them
                action          F, B, I or W of a pipeline, with its micro and stage
                in              phase that launched a kernel
                stream          stream of a kernel
                key, at         identifier of a message, equal on all its ranks; ``sender`` or ``receiver``
                waited, told    start of the host's wait for a message; True if the backend reported its end
    """

    name: str
    kind: str
    lane: str
    begin: float
    end: float
    step: int
    bytes: int | None = None
    ranks: str | None = None
    more: Mapping[str, Any] = MappingProxyType({})

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def moved(self, by: Any) -> Span:
        """Return the span on another clock; ``by(t)`` converts a time of our clock."""
        more = self.more if "waited" not in self.more else {**self.more, "waited": round(by(self.more["waited"]), 7)}
        return self._replace(begin=by(self.begin), end=by(self.end), more=more)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "name": self.name, "kind": self.kind, "lane": self.lane,
            "begin": round(self.begin, 7), "end": round(self.end, 7), "step": self.step,
        }  # fmt: skip
        if self.bytes is not None:
            record["bytes"] = self.bytes
        if self.ranks is not None:
            record["ranks"] = self.ranks
        return {**record, **self.more}


_OWN = ("name", "kind", "lane", "begin", "end", "step", "bytes", "ranks")


def span_of(record: Any) -> Span | None:
    """Parse the result of ``Span.to_json``; return ``None`` for anything else."""
    try:
        begin, end = float(record["begin"]), float(record["end"])
        if not (math.isfinite(begin) and math.isfinite(end) and begin <= end) or record["lane"] not in LANES:
            return None
        size = record.get("bytes")
        return Span(
            name=str(record["name"]),
            kind=record["kind"] if record["kind"] in KINDS else "other",
            lane=record["lane"],
            begin=begin,
            end=end,
            step=int(record["step"]),
            bytes=None if size is None else int(size),
            ranks=record.get("ranks"),
            more={name: value for name, value in record.items() if name not in _OWN},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
