"""Timelines on a GPU: are kernels where they belong, and what does recording cost?

    python benchmarks/observability/timeline_gpu.py            on the GPU, or on the CPU where there is none

Records three steps of a convnet in one process and in two that share the GPU over Gloo; checks that every kernel runs
after the phase that launched it began and inside its step, that all phases have some, and that their sum is no more
than the step; then times steps with and without a recording, in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon
from echelon.observability.trace import summarize, trace_files
from echelon.observability.trace.intervals import length, union
from echelon.observability.trace.span import DEVICE
from echelon.observability.trace.step_breakdown import steps_of
from echelon.observability.trace.trace_files import RankTrace
from echelon.observability.trace.trace_report import timeline_words
from echelon.observability.trace.trace_session import TraceSession

#: Seconds by which two clocks that were put together may still differ.
SLACK = 2e-4
ROUNDS, BLOCK = 6, 20


def convnet(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, width, 2 * width, 2 * width, 4 * width, 4 * width):
        layers += [nn.Conv2d(channels, out, 3, stride=1 + (out != channels), padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def make(directory: str, asked: str | None) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    world = echelon.init()
    on_gpu = world.device.type == "cuda"
    model = convnet(64 if on_gpu else 8).to(world.device)
    engine = echelon.distribute(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        log=echelon.Log(dir=directory, timeline=asked, console=False),
    )
    rows, side = (64, 128) if on_gpu else (8, 16)
    batch = torch.randn(rows, 3, side, side, device=world.device), torch.randint(10, (rows,), device=world.device)
    return engine, batch


def work(directory: str) -> None:
    """Run a rank of the job."""
    engine, batch = make(directory, "6:8")
    for _ in range(10):
        engine.step(*batch)
    engine.close()


# ---- where the kernels are ----


def check(ranked: RankTrace) -> dict[str, Any]:
    phases = {(s.step, s.name): s for s in ranked.spans if "phase" in s.more}
    kernels = [s for s in ranked.spans if s.lane == DEVICE]
    early = [s for s in kernels if s.begin < phases[s.step, s.more["in"]].begin - SLACK]
    steps = {step.number: step for step in steps_of(ranked, {})}
    outside = [s for s in kernels if not steps[s.step].begin - SLACK <= s.begin <= s.end <= steps[s.step].end + SLACK]
    busy = [length(union((s.begin, s.end) for s in kernels if s.step == number)) for number in steps]
    assert not early, f"{len(early)} kernels run before their phase, such as {early[0]}"
    assert not outside, f"{len(outside)} kernels run outside their step, such as {outside[0]}"
    assert all(one <= steps[number].seconds + SLACK for one, number in zip(busy, steps, strict=True))
    found = {name for _, name in phases} & {s.more["in"] for s in kernels}
    if torch.cuda.is_available():
        assert {"forward", "backward", "update"} <= found, f"kernels of {sorted(found)} only"
    return {
        "rank": ranked.rank,
        "kernels_per_step": len(kernels) // len(steps),
        "busy_ms": [round(1e3 * one, 3) for one in busy],
        "step_ms": [round(1e3 * step.seconds, 3) for step in steps.values()],
        "phases_with_kernels": sorted(found),
    }


# ---- what it costs ----


def overhead(directory: str) -> dict[str, float]:
    engine, batch = make(directory, None)
    for _ in range(2 * BLOCK):
        engine.step(*batch)
    off, on, edges = [], [], []
    for turn in range(ROUNDS):
        off.append(timed(engine, batch))
        first = engine.steps + 1
        recording = TraceSession(f"{first}:{first + BLOCK - 1}", "benchmark", Path(directory) / f"{turn}")
        begun = time.perf_counter()
        recording.start(engine._view)
        started = time.perf_counter() - begun
        on.append(timed(engine, batch))
        begun = time.perf_counter()
        recording.after(engine._view)
        edges.append((started, time.perf_counter() - begun))
    engine.close()
    plain, recorded = statistics.median(off), statistics.median(on)
    starts, ends = zip(*edges[1:], strict=True)
    return {
        "step_ms_off": 1e3 * plain,
        "step_ms_on": 1e3 * recorded,
        "overhead_percent": 100 * (recorded / plain - 1),
        "start_ms": 1e3 * statistics.median(starts),
        "finish_ms": 1e3 * statistics.median(ends),
    }


def timed(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    wait()
    begun = time.perf_counter()
    for _ in range(BLOCK):
        engine.step(*batch)
    wait()
    return (time.perf_counter() - begun) / BLOCK


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "rank":
        work(sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as place:
        report: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
        for ranks in (1, 2):
            directory = f"{place}/{ranks}"
            words = ["run", "--procs", str(ranks), "--log-dir", directory, __file__, "rank", directory]
            subprocess.run([sys.executable, "-m", "echelon", *words], check=True)
            report[f"{ranks} ranks"] = [
                check(ranked) for ranked in trace_files.read(Path(directory) / trace_files.FOLDER)
            ]
            print(timeline_words(directory, as_json=False), flush=True)
            report[f"{ranks} ranks, mfu"] = summarize(directory)["mfu"]
        report["overhead"] = {name: round(value, 3) for name, value in overhead(f"{place}/overhead").items()}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
