"""Span: something that one rank did or waited for, from when to when. A recording is a list of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

#: Where a span lies: what the process did, what its GPU did, what travelled.
HOST, DEVICE, NETWORK = "host", "device", "network"
LANES = (HOST, DEVICE, NETWORK)
KINDS = (
    *("forward", "backward", "update", "communicate", "wait", "bubble"),
    *("data", "pull", "push", "other", "kernel"),
)  # fmt: skip


class Span(NamedTuple):
    """begin, end: seconds; while recording on this process's clock, in files on rank 0's.
    bytes:      what travelled
    ranks:      with whom, in short: ``0-3``
    more:       what only some have:
                phase           the span is a phase of the step; phases follow each other without gaps
                action          F, B, I or W of a pipeline, with its micro and stage
                in              of a kernel: the phase that launched it
                stream          of a kernel
                key, at         of a message: the same on all ranks that took part; a sender's or receiver's end of it
                waited, told    of a message: when the host began to wait for it; its end is the backend's word
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
        """On another clock; ``by(t)`` is what its time is at our ``t``."""
        more = self.more if "waited" not in self.more else {**self.more, "waited": round(by(self.more["waited"]), 7)}
        return self._replace(begin=by(self.begin), end=by(self.end), more=more)

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": self.name, "kind": self.kind, "lane": self.lane,
            "begin": round(self.begin, 7), "end": round(self.end, 7), "step": self.step,
        }  # fmt: skip
        if self.bytes is not None:
            told["bytes"] = self.bytes
        if self.ranks is not None:
            told["ranks"] = self.ranks
        return {**told, **self.more}


_OWN = ("name", "kind", "lane", "begin", "end", "step", "bytes", "ranks")


def span_of(told: Any) -> Span | None:
    """The reverse; ``None`` for anything that is no span."""
    try:
        begin, end = float(told["begin"]), float(told["end"])
        if not (math.isfinite(begin) and math.isfinite(end) and begin <= end) or told["lane"] not in LANES:
            return None
        size = told.get("bytes")
        return Span(
            name=str(told["name"]),
            kind=told["kind"] if told["kind"] in KINDS else "other",
            lane=told["lane"],
            begin=begin,
            end=end,
            step=int(told["step"]),
            bytes=None if size is None else int(size),
            ranks=told.get("ranks"),
            more={name: value for name, value in told.items() if name not in _OWN},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
