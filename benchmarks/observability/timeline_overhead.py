"""Cost of recording a timeline per step on a CPU, and the cost while not recording.

    python benchmarks/observability/timeline_overhead.py [--rounds 30] [--steps 20]
           [--out benchmarks/measured/timeline_overhead.json]

Two ranks, data parallel, one thread each. Blocks of steps with and without a recording take turns in one run, so that
whatever else the machine does falls on both alike; the figure is the median over pairs of blocks of the ratio of their
times. On a busy machine that says little: beside it is the processor time that a step takes more, the spans of a step,
the time of one, and that of asking whether there is a recording.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon
from benchmarks import ROOT
from echelon.distributed.activity import activity
from echelon.observability.trace.trace_session import TraceSession

sys.path.insert(0, str(ROOT / "tests" / "support"))
from harness import run


def train(directory: str, rounds: int, steps: int) -> dict[str, float]:
    echelon.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer, log=echelon.Log(console=False))
    batch = torch.randn(64, 512), torch.randint(10, (64,))

    def block() -> tuple[float, float]:
        begun = time.perf_counter(), time.process_time()
        for _ in range(steps):
            engine.step(*batch)
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    def recorded(turn: int) -> tuple[float, float]:
        first = engine.steps + 1
        recording = TraceSession(f"{first}:{first + steps - 1}", "benchmark", Path(directory) / f"{turn}")
        recording.start(engine._view)
        recorder = activity.recorder
        took = block()
        begun = time.perf_counter()
        recording.after(engine._view)
        ends.append(time.perf_counter() - begun)
        spans.append(len(recorder.spans) if recorder is not None else 0)
        return took

    def plain() -> tuple[float, float]:
        echelon.barrier()
        return block()

    block()
    ends: list[float] = []
    spans: list[int] = []
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            pairs.append((plain(), recorded(turn)))
        else:
            after = recorded(turn)
            pairs.append((plain(), after))
    engine.close()
    return {
        "step_ms": 1e3 * statistics.median(off[0] for off, _ in pairs) / steps,
        "overhead_percent": 100 * (statistics.median(on[0] / off[0] for off, on in pairs) - 1),
        "processor_ms": 1e3 * statistics.median(off[1] for off, _ in pairs) / steps,
        "processor_overhead_us": 1e6 * statistics.median(on[1] - off[1] for off, on in pairs) / steps,
        "host_spans_per_step": spans[-1] / steps,
        "finish_ms": 1e3 * statistics.median(ends),
    }


def direct() -> dict[str, float]:
    """Microseconds of one span, of asking whether anything is recorded, and of a step's eight spans to disk."""
    from echelon.observability.trace.comm_hooks import CommHooks
    from echelon.observability.trace.live_writer import LiveSpanWriter
    from echelon.observability.trace.span_recorder import TraceRecorder

    recorder, many = TraceRecorder(1), 20000
    span = timeit.timeit(lambda: recorder.lap("forward", 1.0), number=many) / many
    ask = timeit.timeit("activity.recorder is not None", globals={"activity": activity}, number=10 * many) / many / 10
    recorder = TraceRecorder(1)
    with tempfile.TemporaryDirectory() as directory:
        live = LiveSpanWriter(Path(directory), 0, {}, recorder, CommHooks(recorder))

        def noted() -> None:
            for _ in range(8):
                recorder.lap("forward", 1.0)

        def written() -> None:
            noted()
            live.step()

        alone, both = (min(timeit.repeat(call, number=100, repeat=50)) / 100 for call in (noted, written))
        live.remove()
    return {"span_us": 1e6 * span, "ask_us": 1e6 * ask, "step_written_us": 1e6 * (both - alone)}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--rounds", type=int, default=30)
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--out")
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found: list[dict[str, Any]] = run(train, directory, asked.rounds, asked.steps, ranks=2, timeout=600)
    report = {name: round(value, 4) for name, value in (found[0] | direct()).items()}
    print(json.dumps(report, indent=1))
    if asked.out:
        Path(asked.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
