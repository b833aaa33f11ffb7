"""``DeviceTrace``: records a GPU's kernels and copies with CUPTI while steps are traced, on the clock of all spans.

A kernel belongs to the step and the phase in which the host launched it, even if it runs much later: launch and kernel
have the same correlation number. NCCL kernels count as communication.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from echelon.observability.trace.comm_hooks import CommRecord
from echelon.observability.trace.span import DEVICE, Span
from echelon.observability.trace.span_recorder import now

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LONGEST = 120  # most characters of a kernel's name
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class DeviceTrace:
    """Records the GPU from ``start`` to ``stop``; both synchronize the device."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._behind = 0.0  # the clock of all spans minus wall-clock time, seconds

    def start(self) -> None:
        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)  # else torch warns of cycles
        self._profile.start()
        torch.zeros(1, device="cuda").add_(1)  # the setup of the first launch must not count in the first step
        torch.cuda.synchronize()
        self._behind = _behind()

    def stop(self) -> list[dict[str, Any]]:
        """Stop recording and return all events, with times on the clock of all spans."""
        assert self._profile is not None
        torch.cuda.synchronize()
        behind = (self._behind + _behind()) / 2
        self._profile.stop()
        handle, path = tempfile.mkstemp(prefix="echelon-", suffix=".json")
        os.close(handle)
        try:
            self._profile.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                return events_of(json.load(file), behind)
        finally:
            os.unlink(path)


def _behind() -> float:
    """Return the clock of all spans minus wall-clock time, from the fastest of nine readings."""
    tries = []
    for _ in range(9):
        before, day, after = now(), time.time(), now()
        tries.append((after - before, (before + after) / 2 - day))
    return min(tries)[1]


def events_of(trace: dict[str, Any], behind: float) -> list[dict[str, Any]]:
    """Return the launches and device events of a profiler's trace, with ``begin`` and ``end`` added."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    found = []
    for event in trace.get("traceEvents", []):
        if event.get("ph") == "X" and event.get("cat") in (*_ON_DEVICE, *_LAUNCHES):
            begin = base + event["ts"] / 1e6 + behind
            found.append({**event, "begin": begin, "end": begin + event.get("dur", 0) / 1e6})
    return found


def device_spans(
    events: Iterable[dict[str, Any]], host: Sequence[Span], messages: Sequence[CommRecord] = ()
) -> list[Span]:
    """Return spans of kernels and copies with the step and phase that launched them; others are left out."""
    known = list(events)
    launches = {event["args"].get("correlation"): event for event in known if event["cat"] in _LAUNCHES}
    phases = sorted((span for span in host if "phase" in span.more), key=lambda span: span.begin)
    begins = [span.begin for span in phases]
    sent = sorted((m for m in messages if not m.on_host), key=lambda message: message.begin)
    found = []
    for event in known:
        if event["cat"] not in _ON_DEVICE:
            continue
        launch = launches.get(event["args"].get("correlation"), event)
        at = bisect_right(begins, launch["begin"]) - 1
        if at >= 0 and launch["begin"] <= phases[at].end:
            found.append(_span(event, phases[at], _message(event, launch, sent)))
    return found


def _span(event: dict[str, Any], phase: Span, message: CommRecord | None) -> Span:
    name = event["name"][:LONGEST]
    more: dict[str, Any] = {"in": phase.name, "stream": event["args"].get("stream", 0)}
    if event["cat"] != "kernel":
        more["copy"] = True
    if message is None:
        kind = "communicate" if "nccl" in event["name"].lower() else "kernel"
        return Span(name, kind, DEVICE, event["begin"], event["end"], phase.step, more=more)
    more |= {"key": message.key, "kernel": name, **({"at": message.at} if message.at else {})}
    return Span(
        name=message.name,
        kind="communicate",
        lane=DEVICE,
        begin=event["begin"],
        end=event["end"],
        step=phase.step,
        bytes=message.bytes,
        ranks=message.ranks,
        more=more,
    )


def _message(event: dict[str, Any], launch: dict[str, Any], sent: Sequence[CommRecord]) -> CommRecord | None:
    """Return the collective whose call launched the kernel; None if there is none."""
    if "nccl" not in event["name"].lower():
        return None
    at = bisect_right([message.begin for message in sent], launch["begin"]) - 1
    return sent[at] if at >= 0 and launch["begin"] <= sent[at].launched else None
