"""Cost of the stall watch per step, and of a roll call in the steps that begin with one.

    python benchmarks/observability/stall_overhead.py [--rounds 40] [--steps 25]
           [--out benchmarks/measured/stall_overhead.json]

Two ranks, data parallel, one thread each. Blocks of steps with the watch on (waits noted, a report a second as without
``echelon run``, rank 0 judging) and off (nothing noted, no reporter) take turns in one run, in changing order, so that
whatever else the machine does falls on both alike. The figure is the median over pairs of blocks of the ratio of their
times: on a shared machine single blocks differ by far more than the watch costs, so its direct cost is shown beside:
microseconds for each note, and processor time of a report.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon
from benchmarks import ROOT
from echelon.base.environment import STALL
from echelon.distributed import activity as noting
from echelon.observability.stall import reporter

sys.path.insert(0, str(ROOT / "tests" / "support"))
from harness import run


class _Off:
    """A note that does nothing."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def lap(self, *_: object) -> float:
        return time.monotonic()  # the step clock goes on


def switch(on: bool, engine: echelon.Engine) -> None:
    """Notes and the reporter, on or off. Methods are swapped so that code that has imported the classes is reached."""
    for kind, methods in _KEPT.items():
        for name, method in methods.items():
            setattr(kind, name, method if on else getattr(_Off, name))
    if on:
        reporter.report(engine.world)
    else:
        reporter.stop()


_KEPT: dict[Any, dict[str, Any]] = {
    noting.waiting: {name: noting.waiting.__dict__[name] for name in ("__enter__", "__exit__")},
    noting.Activity: {name: noting.Activity.__dict__[name] for name in ("lap",)},
}


def block(engine: echelon.Engine, batch: tuple[torch.Tensor, ...], steps: int) -> float:
    echelon.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step(*batch)
    return (time.perf_counter() - begun) / steps


def train(width: int, rounds: int, steps: int) -> dict[str, Any]:
    os.environ[STALL] = "60"
    echelon.init(device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = echelon.distribute(model, loss=F.mse_loss, optimizer=sgd, log=echelon.Log(console=False))
    batch = torch.randn(64, width), torch.randn(64, width)
    asked = [block(engine, batch, 1) for _ in range(3)]
    block(engine, batch, steps)
    ratios, times = [], []
    for turn in range(rounds):
        took = {}
        for on in (True, False) if turn % 2 else (False, True):
            switch(on, engine)
            took[on] = block(engine, batch, steps)
        ratios.append(took[True] / took[False])
        times.append(took[False])
    switch(True, engine)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "step_ms": round(1e3 * statistics.median(times), 3),
        "ratio": round(middle, 4),
        "quarters": [round(low, 4), round(high, 4)],
        "first_steps_ms": [round(1e3 * seconds, 2) for seconds in asked],
        "notes_a_step": _notes_a_step(engine, batch),
        **direct(engine),
    }


def _notes_a_step(engine: echelon.Engine, batch: tuple[torch.Tensor, ...]) -> int:
    before = sum(noting.activity.counts.values())
    engine.step(*batch)
    return sum(noting.activity.counts.values()) - before


def direct(engine: echelon.Engine) -> dict[str, float]:
    """Without training around it: the least of several measurements, since disturbance only adds."""
    group, many = engine.world.control, 20_000

    def notes() -> None:
        for _ in range(many):
            with noting.waiting("a sum", "bucket 0", group):
                pass

    teller = reporter.StatusReporter(engine.world.place, 60.0)
    return {
        "note_us": round(1e6 * min(_seconds(notes) for _ in range(5)) / many, 3),
        "report_us": round(
            1e6 * min(_seconds(lambda: [teller.status().to_json() for _ in range(100)]) for _ in range(5)) / 100, 1
        ),
    }


def _seconds(call: Any) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", default="benchmarks/measured/stall_overhead.json")
    options = parser.parse_args()
    results = []
    for width in (128, 512):
        mine = run(train, width, options.rounds, options.steps, timeout=900)[0]
        # all that runs on the rank's own core, as a part of the step
        own = 1e-6 * (mine["notes_a_step"] * mine["note_us"]) / (1e-3 * mine["step_ms"]) + 1e-6 * mine["report_us"]
        results.append({"width": width, **mine, "own_cost": round(own, 5)})
        print(json.dumps(results[-1]))
    facts = {"cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0], "ranks": 2}
    Path(options.out).write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
